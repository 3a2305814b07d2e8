"""How long a follower trusts the confirmed ends that its leader named."""

from __future__ import annotations

from raymq.actors.follower.heard_ends import LAG_MS_MAX, STEP_MS, HeardEnds
from raymq.replication.log_sender import SenderLimits


def all_ends() -> HeardEnds:
    """Ends whose epochs have all begun before."""
    return HeardEnds(lambda end, epoch: True)


def test_an_end_that_was_reached_names_the_epoch_until_it_is_too_old() -> None:
    heard = all_ends()
    assert heard.epoch_of(100, 0) is None
    heard.note(100, 3, 1_000)
    assert heard.epoch_of(99, 1_000) is None
    assert heard.epoch_of(100, 1_000) == 3
    assert heard.epoch_of(100, 1_000 + LAG_MS_MAX) == 3
    assert heard.epoch_of(100, 1_001 + LAG_MS_MAX) is None


def test_a_log_that_is_always_a_little_behind_does_not_lag_too_far() -> None:
    heard = all_ends()
    for step in range(100):
        heard.note(step * 10, 1, step * 100)
        # It has what was confirmed 0.3 s ago.
        assert step < 3 or heard.epoch_of((step - 3) * 10, step * 100) == 1
    # It has what was confirmed 2 s ago.
    assert heard.epoch_of((99 - 20) * 10, 9_900) is None


def test_a_newer_epoch_counts_at_once_and_only_from_the_end_that_its_leader_named() -> None:
    heard = all_ends()
    heard.note(100, 3, 1_000)
    heard.note(200, 4, 1_001)
    assert heard.epoch_of(100, 1_001) == 3
    assert heard.epoch_of(200, 1_001) == 4


def test_few_ends_are_kept_however_many_frames_come() -> None:
    heard = all_ends()
    for now_ms in range(10 * LAG_MS_MAX):
        heard.note(now_ms, 1, now_ms)
        assert len(heard._heard) <= LAG_MS_MAX // STEP_MS + 2


def test_an_idle_stream_is_heard_often_enough_for_readers() -> None:
    late_ms = 200
    assert SenderLimits().idle_heartbeat_ms + STEP_MS + late_ms <= LAG_MS_MAX


def test_an_end_from_before_the_epoch_of_its_leader_is_not_noted() -> None:
    begins = {3: 0, 4: 150}
    heard = HeardEnds(lambda end, epoch: begins[epoch] < end)
    heard.note(100, 3, 1_000)
    heard.note(150, 4, 1_001)
    assert heard.epoch_of(200, 1_001) == 3
    heard.note(151, 4, 1_002)
    assert heard.epoch_of(150, 1_002) == 3
    assert heard.epoch_of(151, 1_002) == 4
