"""Wakeups between an append and its sync: when an end is published, when GroupCommit sleeps, when a try is left out."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from raymq.actors.satellites.flush_service import FlushService
from raymq.actors.satellites.satellite import GrantStatus
from raymq.actors.shared.append_wakeups import AppendNotifier, FlusherView
from raymq.actors.shared.control_block import Leadership
from raymq.actors.shared.idle_cores import IdleCores
from raymq.actors.shared.retry_throttle import PAUSE_MAX, RetryThrottle
from raymq.actors.shared.wakeup import wakeup_directory
from raymq.actors.supervise.supervisor import Supervisor
from raymq.store.base.files import Files
from raymq.store.config.store_config import StoreConfig
from raymq.store.log.flush import GroupCommit
from tests.support.clock import ManualClock


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    made = Supervisor(
        tmp_path, ("group_commit",), clock=ManualClock(), files=Files(), witness_sync=lambda: 0
    )
    made.fence_old()
    made.begin(appended=0, synced=0, confirmed=0)
    yield made
    made.close()
    shutil.rmtree(wakeup_directory(str(tmp_path)), ignore_errors=True)


def test_an_end_that_could_not_be_published_is_published_again(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = supervisor.control
    with monkeypatch.context() as broken:
        broken.setattr(control, "publish_appended", Mock(side_effect=ValueError("released")))
        with pytest.raises(ValueError, match="released"):
            supervisor.appends.publish(100)
    assert control.appended == 0
    supervisor.appends.publish(100)
    assert control.appended == 100


def test_an_append_wakes_replication_only_while_its_replica_leads(tmp_path: Path) -> None:
    roles = ("group_commit", "replication")
    made = Supervisor(tmp_path, roles, clock=ManualClock(), files=Files(), witness_sync=lambda: 0)
    made.fence_old()
    made.begin(appended=0, synced=0, confirmed=0)
    woken: list[str] = []
    made.appends.wake = woken.append
    try:
        made.appends.publish(100)
        made.appends.wake_for_append()
        assert woken == ["group_commit"]

        made.publish_leadership(Leadership(1, 100, made.incarnation))
        woken.clear()
        made.appends.publish(200)
        made.appends.wake_for_append()
        assert woken == ["replication", "group_commit"]
    finally:
        made.close()
        shutil.rmtree(wakeup_directory(str(tmp_path)), ignore_errors=True)


@pytest.mark.parametrize("is_timed", [True, False])
def test_an_append_wakes_flush_real_time_only_if_its_flushes_are_not_timed(
    tmp_path: Path, is_timed: bool
) -> None:
    made = Supervisor(
        tmp_path,
        ("flush_real_time",),
        clock=ManualClock(),
        files=Files(),
        witness_sync=lambda: 0,
        wakes_flush_real_time=not is_timed,
    )
    made.fence_old()
    made.begin(appended=0, synced=0, confirmed=0)
    woken: list[str] = []
    made.appends.wake = woken.append
    try:
        made.appends.publish(100)
        made.appends.wake_for_append()
        assert woken == ([] if is_timed else ["flush_real_time"])
        # The option changes.
        woken.clear()
        made.appends.set_rules(commit_least_bytes=0, wakes_flush_real_time=is_timed)
        made.appends.publish(200)
        made.appends.wake_for_append()
        assert woken == (["flush_real_time"] if is_timed else [])
    finally:
        made.close()
        shutil.rmtree(wakeup_directory(str(tmp_path)), ignore_errors=True)


class ScriptedLoop(FlushService):
    """Runs GroupCommit's loop over these committed ends (-1: a timeout without wakeup). It exits after the last one."""

    def __init__(self, root: Path, found: list[int]) -> None:
        super().__init__(root, "group_commit", StoreConfig())
        self.found = found
        self.calls: list[str] = []
        satellite = Mock(base=0)
        satellite.grant_status.side_effect = lambda: (
            GrantStatus.GRANTED if self.found else GrantStatus.FENCED
        )
        satellite.wait.side_effect = self.wait
        satellite.appends.await_announced.side_effect = lambda synced: self.calls.append(
            f"await {synced}"
        )
        self._satellite = satellite

    def wait(self, timeout_ms: int) -> bool:
        self.calls.append(f"wait {timeout_ms}")
        return bool(self.found)

    def _sync_once(self, group_commit: GroupCommit) -> bool:
        end = self.found.pop(0) if self.found else -1
        group_commit.synced = max(group_commit.synced, end)
        return end >= 0


@pytest.mark.parametrize(
    ("found", "calls"),
    [
        # Woken: it awaits the announced append after the synced end, and syncs before it checks its grant.
        ([-1, 100, -1], ["wait 10", "await 0", "wait 10"]),
        # More was appended during a sync: it does not sleep in between.
        ([100, 200], []),
        ([100, -1, 200], ["wait 10", "await 100"]),
        ([-1, -1, -1], ["wait 10", "await 0", "wait 10"]),
    ],
)
def test_group_commit_sleeps_only_when_all_is_synced(
    tmp_path: Path, found: list[int], calls: list[str]
) -> None:
    loop = ScriptedLoop(tmp_path, found)
    loop._serve_group_commit()
    assert loop.calls == calls


class TickingClock(ManualClock):
    """Each reading takes a microsecond; a nap takes as long as it asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0
        self.naps_us: list[float] = []

    def monotonic(self) -> float:
        self.seconds += 1e-6
        return self.seconds

    def nap(self, seconds: float) -> None:
        self.naps_us.append(seconds * 1e6)
        self.seconds += seconds


class TimedFlusher:
    """Reports the end 100 as synced when its clock has reached a time."""

    sync_started = 0

    def __init__(self, clock: TickingClock) -> None:
        self._clock = clock
        self.synced_at_s = 0.0

    @property
    def position(self) -> int:
        return 100 if self._clock.seconds >= self.synced_at_s else 0


def notifier_of(clock: ManualClock, *, flusher: FlusherView | None, are_idle: bool = True):
    cores = Mock(spec=IdleCores)
    cores.are_idle.return_value = are_idle
    return AppendNotifier(
        Mock(), ["group_commit"], flusher, clock=clock, cores=cores, commit_least_bytes=0
    )


@pytest.mark.parametrize("are_idle", [True, False])
def test_nothing_is_announced_and_no_sync_is_awaited_while_no_core_has_time_to_spare(
    are_idle: bool,
) -> None:
    clock = TickingClock()
    notifier = notifier_of(clock, flusher=TimedFlusher(clock), are_idle=are_idle)
    woken: list[str] = []
    notifier.wake = woken.append
    notifier.announce()
    assert woken == (["group_commit"] if are_idle else [])
    assert notifier.may_await_synced() is are_idle


def test_no_sync_is_awaited_without_a_flusher() -> None:
    assert not notifier_of(TickingClock(), flusher=None).may_await_synced()


@pytest.mark.parametrize(("sync_us", "nap_us"), [(300, 150), (100, 50), (40, None)])
def test_a_put_that_waits_alone_sleeps_for_half_of_a_usual_sync(
    sync_us: int, nap_us: int | None
) -> None:
    clock = TickingClock()
    flusher = TimedFlusher(clock)
    notifier = notifier_of(clock, flusher=flusher)
    late_us: list[float] = []
    for _ in range(100):
        flusher.synced_at_s = clock.seconds + sync_us / 1e6
        assert notifier.await_synced(100, lambda: True)
        late_us.append((clock.seconds - flusher.synced_at_s) * 1e6)
    assert max(late_us) < 5
    if nap_us is None:
        assert not clock.naps_us
    else:
        assert clock.naps_us[-1] == pytest.approx(nap_us, rel=0.1)


def test_the_throttle_skips_more_after_each_failure_until_a_try_works() -> None:
    throttle = RetryThrottle()
    pauses = []
    for _ in range(8):
        assert throttle.should_try()
        throttle.note_result(worked=False)
        left_out = 0
        while not throttle.should_try():
            left_out += 1
        pauses.append(left_out)
    assert pauses == [1, 2, 4, 8, 16, PAUSE_MAX, PAUSE_MAX, PAUSE_MAX]
    throttle.note_result(worked=True)
    assert throttle.should_try()
    throttle.note_result(worked=False)
    assert [throttle.should_try(), throttle.should_try()] == [False, True]
