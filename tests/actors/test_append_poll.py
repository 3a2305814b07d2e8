"""How a flusher looks for the next put of somebody who sends one behind the other, and how it is told of none."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from raymq.actors.satellites.flush_service import FlushService
from raymq.actors.satellites.satellite import Satellite, Standing
from raymq.actors.shared.control_block import POLL_US
from raymq.actors.shared.retry_throttle import PAUSE_MAX, RetryThrottle
from raymq.actors.shared.wakeup import wakeup_directory
from raymq.actors.supervise.supervisor import Supervisor
from raymq.store.config import StoreConfig
from raymq.store.files import Files
from raymq.store.log.flush import GroupCommit
from tests.support.clock import ManualClock


class LookingClock(ManualClock):
    """Each look at it takes a tenth of a poll; `at_look` says what happens at the n-th one."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0
        self.at_look: dict[int, Callable[[], None]] = {}

    def monotonic(self) -> float:
        self.looks += 1
        self.at_look.pop(self.looks, lambda: None)()
        return self.looks * POLL_US / 10 / 1e6


class Pair:
    """CommitLog's side, and the flusher's."""

    def __init__(self, root: Path, roles: tuple[str, ...]) -> None:
        self.root = root
        self.clock = LookingClock()
        self.supervisor = Supervisor(
            root, roles, clock=ManualClock(), files=Files(), witness_sync=lambda: 0
        )
        self.supervisor.fence_old()
        self.supervisor.begin(0, 0, 0)
        self.satellite = Satellite(root, "group_commit", clock=self.clock, files=Files())
        self.satellite.attach()
        self.rung: list[str] = []
        self.end = 0

    def put(self, *, announced: bool) -> None:
        if announced:
            self.supervisor.announce_append()
        self.end += 100
        self.supervisor.publish_appended(self.end)

    def poll(self, *, put_at_look: int | None = None) -> int:
        """Returns: how often it looked."""
        self.clock.looks = 0
        if put_at_look is not None:
            self.clock.at_look[put_at_look] = lambda: self.put(announced=True)
        self.satellite.poll_append(self.end)
        return self.clock.looks

    @property
    def polling(self) -> bool:
        return self.satellite._control.polling

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
    wakeup = made.supervisor._wakeup
    assert wakeup is not None
    monkeypatch.setattr(wakeup, "wake", made.rung.append)
    yield made
    made.close()


def test_behind_an_announced_put_it_looks_until_the_next_one(pair: Pair):
    pair.put(announced=True)
    assert pair.poll(put_at_look=5) == 5
    assert pair.satellite.appended == 200


def test_it_looks_no_longer_than_a_way_there_and_back(pair: Pair):
    pair.put(announced=True)
    # One look is a tenth of it; the first one is the deadline's.
    assert pair.poll() in (11, 12)


def test_behind_a_put_that_was_not_announced_it_does_not_look(pair: Pair):
    pair.put(announced=True)
    pair.put(announced=False)
    assert pair.poll() == 0


def test_an_announced_put_that_is_published_twice_stays_announced(pair: Pair):
    pair.put(announced=True)
    pair.supervisor.publish_appended(pair.end)
    assert pair.poll() > 0


def test_in_vain_it_looks_ever_less_often(pair: Pair):
    pair.put(announced=True)
    looked = [pair.poll() > 0 for _ in range(10)]
    assert looked == [True, False, True, False, False, True, False, False, False, False]


def test_while_it_looks_an_announced_put_rings_no_bell(pair: Pair):
    pair.put(announced=True)
    pair.rung.clear()

    def put() -> None:
        assert pair.polling
        pair.put(announced=True)
        pair.supervisor.wake_for_append()

    pair.clock.at_look[3] = put
    pair.satellite.poll_append(pair.end)
    assert pair.rung == []
    assert not pair.polling


def test_a_put_it_did_not_see_before_it_gave_up_is_rung_for(pair: Pair):
    pair.put(announced=True)
    pair.rung.clear()
    pair.clock.at_look[3] = pair.supervisor.announce_append
    pair.satellite.poll_append(pair.end)
    assert pair.rung == []
    pair.end += 100
    pair.supervisor.publish_appended(pair.end)
    pair.supervisor.wake_for_append()
    assert pair.rung == ["group_commit"]


@pytest.mark.parametrize("roles", [("group_commit", "commit_real_time")])
def test_with_the_pool_the_flusher_does_not_look_for_appends(pair: Pair):
    pair.put(announced=True)
    assert pair.poll() == 0


def test_an_end_that_could_not_be_published_is_published_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
):
    control = pair.supervisor._control
    with monkeypatch.context() as broken:
        broken.setattr(control, "publish_appended", Mock(side_effect=ValueError("released")))
        with pytest.raises(ValueError, match="released"):
            pair.put(announced=False)
    assert control.appended == 0
    pair.supervisor.publish_appended(pair.end)
    assert control.appended == pair.end


class ScriptedLoop(FlushService):
    """GroupCommit's loop over looks that find these ends, -1 for none; it leaves behind the last one."""

    def __init__(self, root: Path, found: list[int]) -> None:
        super().__init__(root, "group_commit", StoreConfig())
        self.found = found
        self.told: list[str] = []
        satellite = Mock(base=0)
        satellite.standing.side_effect = lambda: Standing.GRANTED if self.found else Standing.FENCED
        satellite.wait.side_effect = self.wait
        satellite.poll_append.side_effect = lambda flushed: self.told.append(f"poll {flushed}")
        self._satellite = satellite

    def wait(self, timeout_ms: int) -> bool:
        self.told.append(f"wait {timeout_ms}")
        return bool(self.found)

    def _commit_once(self, commit: GroupCommit) -> bool:
        end = self.found.pop(0) if self.found else -1
        commit.flushed = max(commit.flushed, end)
        return end >= 0


@pytest.mark.parametrize(
    ("found", "told"),
    [
        # Rung for, and all of it found at once: it asks although nothing is left behind that.
        ([-1, 100, -1], ["wait 10", "poll 100", "wait 10"]),
        # A wakeup that comes after the sync of its own append begins no second one.
        ([100, 100, -1], ["poll 100", "wait 10"]),
        ([100, 200], ["poll 100", "poll 200"]),
        ([-1, -1, -1], ["wait 10", "wait 10"]),
    ],
)
def test_group_commit_looks_on_once_behind_each_sync(
    tmp_path: Path, found: list[int], told: list[str]
):
    loop = ScriptedLoop(tmp_path, found)
    loop._group_commit()
    assert loop.told == told


def test_a_new_commit_log_takes_nobody_for_looking(pair: Pair):
    pair.put(announced=True)
    # The flusher was killed while it looked.
    pair.satellite._control.polling = True
    pair.supervisor.begin(pair.end, pair.end, pair.end)
    assert not pair.polling
    assert pair.poll() == 0


def test_a_flusher_behind_one_that_was_killed_while_it_looked_is_rung_for(pair: Pair):
    pair.satellite.close()
    pair.supervisor._control.polling = True
    pair.satellite = Satellite(pair.root, "group_commit", clock=pair.clock, files=Files())
    pair.satellite.attach()
    pair.put(announced=False)
    pair.supervisor.wake_for_append()
    assert pair.rung == ["group_commit"]


def test_tries_in_vain_leave_out_ever_more_until_one_works():
    throttle = RetryThrottle()
    pauses = []
    for _ in range(8):
        assert throttle.should_try()
        throttle.record(worked=False)
        left_out = 0
        while not throttle.should_try():
            left_out += 1
        pauses.append(left_out)
    assert pauses == [1, 2, 4, 8, 16, PAUSE_MAX, PAUSE_MAX, PAUSE_MAX]
    throttle.record(worked=True)
    assert throttle.should_try()
    throttle.record(worked=False)
    assert [throttle.should_try(), throttle.should_try()] == [False, True]
