"""Every order of (bytes, field, wakeup, death) between CommitLog and a flusher, in one process.

Supervisor, Satellite, fields and wakeups are the real ones. The test sets only the disk (which bytes are written, which
synced) and the processes (which have exited). After every step, nothing counts as synced that is not on the disk.
At the end of every run, dead processes are replaced and, without any wakeup, everything written gets synced.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path

import pytest

from raymq.actors.satellites.satellite import GrantStatus, Satellite
from raymq.actors.shared.processes import ProcessIdentity
from raymq.actors.shared.ring import RingEntry
from raymq.actors.shared.wakeup import wakeup_directory
from raymq.actors.supervise import lease, supervisor
from raymq.actors.supervise.supervisor import FenceReport, Supervisor
from raymq.replication.combiner import LatePuts
from raymq.store.base.files import Files
from raymq.store.base.status import PutStatus
from tests.support.clock import ManualClock

ROLE = "group_commit"
START, END = 100, 200

COMMIT_LOG_STEPS = ("write", "publish", "wake")
FLUSHER_STEPS = ("wait", "read", "start", "sync", "publish", "wake")


class Disk:
    """Which bytes are in the file, and which of them survive."""

    def __init__(self) -> None:
        self.written = self.synced = START

    def sync(self) -> int:
        self.synced = self.written
        return self.synced


class Table:
    """The process table: every satellite of a run has this process's pid. The test says when it exits."""

    def __init__(self) -> None:
        self.exited = False


class Handle:
    """Stands for ProcessHandle: a kill takes effect at once."""

    def __init__(self, table: Table, identity: ProcessIdentity) -> None:
        self._table = table
        self.identity = identity

    def exited(self) -> bool:
        return self._table.exited

    def kill(self) -> None:
        self._table.exited = True

    def wait_exit(self, timeout_ms: int) -> bool:
        return self._table.exited

    def close(self) -> None:
        return


class SteppedFlusher(Satellite):
    """A flusher whose iteration is cut into the steps that another process can see."""

    read = START

    def wake_others(self, *, commit_log: bool = True) -> None:
        """The step "wake" does it: a process may end between the position and the wakeup."""

    def step(self, name: str, disk: Disk) -> None:
        if name == "wait":
            # No time passes: a wakeup, a lost wakeup and a timeout all end here.
            self.wait(0)
        elif name == "read":
            self.read = max(self.appended, self.base)
        elif name == "start":
            self.publish_sync_started(self.read)
        elif name == "sync":
            disk.sync()
        elif name == "publish":
            self.publish_position(self.read)
        else:
            super().wake_others()


class World:
    """One replica: CommitLog's supervisor, one flusher, the disk under both."""

    def __init__(self, root: Path, table: Table) -> None:
        self.root = root
        self.table = table
        self.disk = Disk()
        self.clock = ManualClock()
        self.old: list[Satellite] = []
        self.supervisor, _ = self.start_commit_log()
        self.flusher = self.start_flusher()

    def start_commit_log(self) -> tuple[Supervisor, FenceReport]:
        new = Supervisor(
            self.root, [ROLE], clock=self.clock, files=Files(), witness_sync=self.disk.sync
        )
        report = new.fence_old()
        self.disk.sync()
        new.begin(appended=self.disk.written, synced=self.disk.synced, confirmed=self.disk.synced)
        return new, report

    def start_flusher(self) -> SteppedFlusher:
        self.table.exited = False
        flusher = SteppedFlusher(self.root, ROLE, clock=self.clock, files=Files())
        flusher.attach()
        self.old.append(flusher)
        self.supervisor.tick()
        assert flusher.grant_status() is GrantStatus.GRANTED
        return flusher

    def commit_log_step(self, name: str) -> None:
        if name == "write":
            self.disk.written = END
        elif name == "publish":
            self.supervisor.appends.publish(END)
        else:
            self.supervisor.appends.wake_for_append()

    def check(self) -> int:
        synced = self.supervisor.progress().ends.synced
        assert synced <= self.disk.synced
        return synced

    def flusher_dies(self) -> None:
        self.table.exited = True
        self.supervisor.tick()
        self.check()
        self.flusher = self.start_flusher()

    def commit_log_dies(self) -> FenceReport:
        """CommitLog dies, and its successor fences the flusher. Only the shared files connect the two."""
        dead = self.supervisor
        self.supervisor, report = self.start_commit_log()
        # Not Wakeup.close: as after a SIGKILL, the name stays (and is the successor's by now).
        assert dead._wakeup is not None
        dead._wakeup._close_sockets()
        for dead_lease in dead._leases.values():
            dead_lease.close()
        self.flusher = self.start_flusher()
        return report

    def finish(self) -> None:
        """Bring all ends to the log's without a wakeup: the waits time out, and the shared fields suffice."""
        if self.supervisor.appends.appended < self.disk.written:
            self.supervisor.appends.publish(self.disk.written)
        for step in FLUSHER_STEPS[:-1]:
            self.flusher.step(step, self.disk)
            self.check()
        assert self.check() == self.disk.written

    def close(self) -> None:
        for satellite in self.old:
            satellite.close()
        self.supervisor.close()


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Table]:
    table = Table()

    class Handles:
        @staticmethod
        def open(identity: ProcessIdentity, *, files: Files) -> Handle | None:
            return None if table.exited else Handle(table, identity)

    monkeypatch.setattr(lease, "ProcessHandle", Handles)
    monkeypatch.setattr(supervisor, "ProcessHandle", Handles)
    yield table
    shutil.rmtree(wakeup_directory(str(tmp_path)))


@pytest.fixture
def make_world(tmp_path: Path, table: Table) -> Callable[[], World]:
    return lambda: World(tmp_path, table)


def orders() -> Iterator[list[tuple[str, str]]]:
    """Every merge of the two sequences of steps."""
    total = len(COMMIT_LOG_STEPS) + len(FLUSHER_STEPS)
    for ours_at in combinations(range(total), len(COMMIT_LOG_STEPS)):
        ours, theirs = iter(COMMIT_LOG_STEPS), iter(FLUSHER_STEPS)
        yield [
            ("commit_log", next(ours)) if at in ours_at else ("flusher", next(theirs))
            for at in range(total)
        ]


ORDERS = list(orders())


def run(world: World, order: list[tuple[str, str]]) -> None:
    for who, step in order:
        if who == "commit_log":
            world.commit_log_step(step)
        else:
            world.flusher.step(step, world.disk)
        world.check()


def without_wakeups(order: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(who, step) for who, step in order if step != "wake"]


def test_a_position_is_published_before_commit_log_is_woken(
    make_world: Callable[[], World],
) -> None:
    world = make_world()
    for step in ("write", "publish"):
        world.commit_log_step(step)
    while world.supervisor.wait(0):
        pass
    for step in ("read", "start", "sync", "publish", "wake"):
        world.flusher.step(step, world.disk)
        assert world.supervisor.wait(0) == (step == "wake"), step
    world.close()


def test_there_are_84_orders():
    assert len(ORDERS) == len({tuple(order) for order in ORDERS}) == 84


@pytest.mark.parametrize("wakeups", [True, False])
def test_every_order_ends_synced(make_world: Callable[[], World], wakeups: bool):
    for order in ORDERS:
        world = make_world()
        run(world, order if wakeups else without_wakeups(order))
        world.finish()
        world.close()


def test_the_flusher_may_die_at_every_point_of_every_order(make_world: Callable[[], World]):
    for order in ORDERS:
        for death in [at for at, (who, _) in enumerate(order) if who == "flusher"]:
            world = make_world()
            run(world, order[:death])
            world.flusher_dies()
            run(world, [(who, step) for who, step in order[death:] if who == "commit_log"])
            world.finish()
            world.close()


def test_commit_log_may_die_at_every_point_of_every_order(make_world: Callable[[], World]):
    for order in ORDERS:
        for death in [at for at, (who, _) in enumerate(order) if who == "commit_log"]:
            world = make_world()
            run(world, order[:death])
            # The flusher continues for a while before the successor's fence kills it.
            for _, step in [entry for entry in order[death:] if entry[0] == "flusher"][:3]:
                world.flusher.step(step, world.disk)

            in_flight = world.flusher._record.sync_started.value > world.flusher._record.position(
                world.flusher.fencing_token
            )
            report = world.commit_log_dies()
            assert (report.unfinished_sync is not None) == in_flight
            world.check()
            world.finish()
            world.close()


@pytest.mark.parametrize("at", range(4))
def test_a_polled_sync_is_seen_or_wakes_commit_log(make_world: Callable[[], World], at: int):
    world = make_world()
    for step in ("write", "publish"):
        world.commit_log_step(step)
    for step in ("read", "start", "sync"):
        world.flusher.step(step, world.disk)
    while world.supervisor.wait(0):
        pass
    seen: list[bool] = []

    def watch(watching: bool) -> None:
        world.supervisor.control.commit_log_polls = watching

    steps = [lambda: watch(True), lambda: watch(False), lambda: seen.append(world.check() == END)]
    # The flusher's own wakeup. Its other steps send none.
    steps.insert(at, lambda: Satellite.publish_position(world.flusher, END))
    world.flusher.wake_others = lambda commit_log=True: Satellite.wake_others(  # type: ignore[method-assign]
        world.flusher, commit_log=commit_log
    )
    for do in steps:
        do()
    woken = world.supervisor.wait(0)
    assert seen == [True] or woken
    assert woken == (at != 1)
    world.close()


def test_a_new_commit_log_does_not_poll(make_world: Callable[[], World]):
    world = make_world()
    world.supervisor.control.commit_log_polls = True
    world.commit_log_dies()
    assert not world.supervisor.control.commit_log_polls
    world.close()


def test_the_check_catches_a_flusher_that_publishes_before_it_synced(
    make_world: Callable[[], World],
):
    world = make_world()
    with pytest.raises(AssertionError):
        run(
            world,
            [("commit_log", "write"), ("commit_log", "publish")]
            + [("flusher", step) for step in ("wait", "read", "start", "publish", "sync")],
        )
    world.close()


@pytest.mark.parametrize("reached", range(len(FLUSHER_STEPS) + 1))
def test_fields_with_an_old_fencing_token_count_as_0(make_world: Callable[[], World], reached: int):
    """A truncation comes in between. The old flusher publishes the rest of its iteration after it."""
    world = make_world()
    for step in COMMIT_LOG_STEPS:
        world.commit_log_step(step)
    for step in FLUSHER_STEPS[:reached]:
        world.flusher.step(step, world.disk)

    zombie = world.flusher
    world.supervisor.revoke(ROLE)
    world.disk.written = world.disk.synced = START
    world.supervisor.begin(appended=START, synced=START, confirmed=START)

    for step in FLUSHER_STEPS[reached:]:
        if step != "read":
            zombie.step(step, world.disk)
        assert world.check() == START

    assert zombie.grant_status() is GrantStatus.FENCED
    world.flusher = world.start_flusher()
    assert world.check() == START
    world.disk.written = END
    world.finish()
    assert world.check() == END
    world.close()


def test_a_revoked_role_stays_vacant_until_the_next_begin(make_world: Callable[[], World]):
    world = make_world()
    world.supervisor.revoke(ROLE)
    world.table.exited = False
    candidate = SteppedFlusher(world.root, ROLE, clock=world.clock, files=Files())
    candidate.attach()
    world.old.append(candidate)
    world.supervisor.tick()
    assert candidate.grant_status() is GrantStatus.WAITING
    world.supervisor.begin(appended=START, synced=START, confirmed=START)
    world.supervisor.tick()
    assert candidate.grant_status() is GrantStatus.GRANTED
    world.close()


def test_a_silent_satellite_is_revoked_but_not_after_a_pause_of_commit_log(
    make_world: Callable[[], World],
):
    world = make_world()
    world.clock.advance(60_000)
    world.supervisor.tick()
    assert world.flusher.grant_status() is GrantStatus.GRANTED
    for _ in range(3):
        world.clock.advance(900)
        world.supervisor.tick()
    assert world.flusher.grant_status() is GrantStatus.FENCED
    assert world.table.exited
    world.close()


def test_a_satellite_with_a_heartbeat_keeps_its_lease(make_world: Callable[[], World]):
    world = make_world()
    for _ in range(10):
        world.clock.advance(900)
        world.flusher.wait(0)
        world.supervisor.tick()
    assert world.flusher.grant_status() is GrantStatus.GRANTED
    world.close()


@pytest.mark.parametrize(
    ("publish", "report"),
    [(publish, report) for report in range(3) for publish in range(report + 1)],
)
@pytest.mark.usefixtures("table")
def test_a_put_acknowledged_before_a_late_report_is_not_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, publish: int, report: int
):
    """Replication publishes its position, then late puts: before, during or after CommitLog's check."""
    leader = Supervisor(
        tmp_path, ["replication"], clock=ManualClock(), files=Files(), witness_sync=lambda: 0
    )
    leader.fence_old()
    leader.begin(appended=0, synced=0, confirmed=0)
    replication = Satellite(tmp_path, "replication", clock=ManualClock(), files=Files())
    replication.attach()
    leader.tick()
    assert replication.grant_status() is GrantStatus.GRANTED
    leader.appends.publish(END)
    assert leader.submit(2, END, 0)
    assert replication.rings.requests.take_all() == [(2, END, 0)]
    late = (2, END, PutStatus.FLUSH_SLAVE_TIMEOUT.code)

    def act(now: int) -> None:
        if publish == now:
            replication.publish_position(START)
        if report == now:
            assert replication.rings.late.push(late)

    rings = leader._rings
    assert rings is not None
    take_late = rings.late.take_all

    def look() -> list[RingEntry]:
        act(0)
        taken = take_late()
        act(1)
        return taken

    monkeypatch.setattr(rings.late, "take_all", look)
    first = leader.progress()
    assert bool(first.late) == (report == 0)
    assert first.ends.replicated == (START if publish < 2 else 0)
    act(2)
    monkeypatch.undo()
    second = leader.progress()
    assert second.ends.replicated == START
    assert first.late + second.late == [LatePuts(2, END, PutStatus.FLUSH_SLAVE_TIMEOUT)]
    replication.close()
    leader.close()
