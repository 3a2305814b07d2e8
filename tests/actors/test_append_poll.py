"""GroupCommit polls for the next put of a producer that sends one after the other, and is not woken meanwhile."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from raymq.actors.satellites.flush_service import FlushService
from raymq.actors.satellites.satellite import GrantStatus, Satellite
from raymq.actors.shared.append_wakeups import POLL_US
from raymq.actors.shared.retry_throttle import PAUSE_MAX, RetryThrottle
from raymq.actors.shared.wakeup import wakeup_directory
from raymq.actors.supervise.supervisor import Supervisor
from raymq.store.base.files import Files
from raymq.store.config.store_config import StoreConfig
from raymq.store.log.flush import GroupCommit
from tests.support.clock import ManualClock


class PolledClock(ManualClock):
    """Each read of this clock takes a tenth of POLL_US. `at_read` holds actions for the n-th read."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0
        self.at_read: dict[int, Callable[[], None]] = {}

    def monotonic(self) -> float:
        self.reads += 1
        self.at_read.pop(self.reads, lambda: None)()
        return self.reads * POLL_US / 10 / 1e6


class Pair:
    """CommitLog's side and the flusher's side."""

    def __init__(self, root: Path, roles: tuple[str, ...]) -> None:
        self.root = root
        self.clock = PolledClock()
        self.supervisor = Supervisor(
            root, roles, clock=ManualClock(), files=Files(), witness_sync=lambda: 0
        )
        self.supervisor.fence_old()
        self.supervisor.begin(0, 0, 0)
        self.satellite = Satellite(root, "group_commit", clock=self.clock, files=Files())
        self.satellite.attach()
        self.woken: list[str] = []
        self.end = 0

    def put(self, *, announced: bool) -> None:
        if announced:
            self.supervisor.appends.announce()
        self.end += 100
        self.supervisor.appends.publish(self.end)

    def poll(self, *, put_at_read: int | None = None) -> int:
        """Returns: how often it read the clock."""
        self.clock.reads = 0
        if put_at_read is not None:
            self.clock.at_read[put_at_read] = lambda: self.put(announced=True)
        self.satellite.appends.poll_next(self.end)
        return self.clock.reads

    @property
    def polling(self) -> bool:
        return self.satellite._control.group_commit_polls

    def close(self) -> None:
        self.satellite.close()
        self.supervisor.close()
        shutil.rmtree(wakeup_directory(str(self.root)), ignore_errors=True)


@pytest.fixture
def roles() -> tuple[str, ...]:
    return ("group_commit",)


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, roles: tuple[str, ...]) -> Iterator[Pair]:
    made = Pair(tmp_path, roles)
    monkeypatch.setattr(made.supervisor.appends, "wake", made.woken.append)
    yield made
    made.close()


def test_after_an_announced_put_group_commit_polls_until_the_next_one(pair: Pair):
    pair.put(announced=True)
    assert pair.poll(put_at_read=5) == 5
    assert pair.satellite.appended == 200


def test_group_commit_polls_no_longer_than_a_round_trip(pair: Pair):
    pair.put(announced=True)
    # One read is a tenth of it. The first read is for the deadline.
    assert pair.poll() in (11, 12)


def test_after_a_put_that_was_not_announced_group_commit_does_not_poll(pair: Pair):
    pair.put(announced=True)
    pair.put(announced=False)
    assert pair.poll() == 0


def test_an_announced_put_that_is_published_twice_stays_announced(pair: Pair):
    pair.put(announced=True)
    pair.supervisor.appends.publish(pair.end)
    assert pair.poll() > 0


def test_polling_that_does_not_help_becomes_rare(pair: Pair):
    pair.put(announced=True)
    looked = [pair.poll() > 0 for _ in range(10)]
    assert looked == [True, False, True, False, False, True, False, False, False, False]


def test_while_group_commit_polls_an_announced_put_does_not_wake_it(pair: Pair):
    pair.put(announced=True)
    pair.woken.clear()

    def put() -> None:
        assert pair.polling
        pair.put(announced=True)
        pair.supervisor.appends.wake_for_append()

    pair.clock.at_read[3] = put
    pair.satellite.appends.poll_next(pair.end)
    assert pair.woken == []
    assert not pair.polling


def test_a_put_after_the_end_of_a_poll_wakes_group_commit(pair: Pair):
    pair.put(announced=True)
    pair.woken.clear()
    pair.clock.at_read[3] = pair.supervisor.appends.announce
    pair.satellite.appends.poll_next(pair.end)
    assert pair.woken == []
    pair.end += 100
    pair.supervisor.appends.publish(pair.end)
    pair.supervisor.appends.wake_for_append()
    assert pair.woken == ["group_commit"]


@pytest.mark.parametrize("roles", [("group_commit", "commit_real_time")])
def test_with_the_pool_group_commit_does_not_poll_for_appends(pair: Pair):
    pair.put(announced=True)
    assert pair.poll() == 0


def test_an_end_that_could_not_be_published_is_published_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
):
    control = pair.supervisor.control
    with monkeypatch.context() as broken:
        broken.setattr(control, "publish_appended", Mock(side_effect=ValueError("released")))
        with pytest.raises(ValueError, match="released"):
            pair.put(announced=False)
    assert control.appended == 0
    pair.supervisor.appends.publish(pair.end)
    assert control.appended == pair.end


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
        satellite.appends.poll_next.side_effect = lambda flushed: self.calls.append(
            f"poll {flushed}"
        )
        self._satellite = satellite

    def wait(self, timeout_ms: int) -> bool:
        self.calls.append(f"wait {timeout_ms}")
        return bool(self.found)

    def _commit_once(self, commit: GroupCommit) -> bool:
        end = self.found.pop(0) if self.found else -1
        commit.flushed = max(commit.flushed, end)
        return end >= 0


@pytest.mark.parametrize(
    ("found", "calls"),
    [
        # Woken, and the append is there at once: it polls although no more is announced.
        ([-1, 100, -1], ["wait 10", "poll 100", "wait 10"]),
        # A wakeup that comes after the sync of its append does not start a second sync.
        ([100, 100, -1], ["poll 100", "wait 10"]),
        ([100, 200], ["poll 100", "poll 200"]),
        ([-1, -1, -1], ["wait 10", "wait 10"]),
    ],
)
def test_group_commit_polls_once_after_each_sync(
    tmp_path: Path, found: list[int], calls: list[str]
):
    loop = ScriptedLoop(tmp_path, found)
    loop._group_commit()
    assert loop.calls == calls


def test_a_new_commit_log_clears_the_polling_hint(pair: Pair):
    pair.put(announced=True)
    # The flusher was killed while it polled.
    pair.satellite._control.group_commit_polls = True
    pair.supervisor.begin(pair.end, pair.end, pair.end)
    assert not pair.polling
    assert pair.poll() == 0


def test_the_successor_of_a_flusher_that_was_killed_while_polling_is_woken(pair: Pair):
    pair.satellite.close()
    pair.supervisor.control.group_commit_polls = True
    pair.satellite = Satellite(pair.root, "group_commit", clock=pair.clock, files=Files())
    pair.satellite.attach()
    pair.put(announced=False)
    pair.supervisor.appends.wake_for_append()
    assert pair.woken == ["group_commit"]


def test_the_throttle_skips_more_after_each_failure_until_a_try_works():
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
