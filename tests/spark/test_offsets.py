"""Offsets of Spark's reads: Kafka's JSON, positions, and the share of each queue in a batch. No Spark."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as some

from raymq.client.consume.queue_ranges import QueueRange, split_by_lag, split_ranges
from raymq.spark.offsets import (
    EARLIEST,
    LATEST,
    HeldOffsets,
    Position,
    TopicQueue,
    check_ends,
    from_json,
    report_loss,
    resolve,
    to_json,
)
from raymq.store.base.errors import OffsetOutOfRange, Rejected

A, B, C = TopicQueue("a", 0), TopicQueue("a", 1), TopicQueue("b", 0)
ENDS = {A: HeldOffsets(0, 5, 20), B: HeldOffsets(1, 0, 0), C: HeldOffsets(0, 2, 9)}


def never(queue: TopicQueue, time_ms: int) -> int | None:
    return None


def test_offsets_go_to_kafkas_json_and_back() -> None:
    offsets = {C: 9, A: 5, B: 0}
    assert to_json(offsets) == {"a": {"0": 5, "1": 0}, "b": {"0": 9}}
    assert from_json(to_json(offsets)) == offsets


def test_a_word_means_an_end_of_each_queue_and_a_number_itself() -> None:
    def offsets(value: object) -> object:
        position = Position("startingOffsets", "offset", value)
        return resolve(position, ENDS, never, without_match="error")

    assert offsets(EARLIEST) == {A: 5, B: 0, C: 2}
    assert offsets(LATEST) == {A: 20, B: 0, C: 9}
    assert offsets({A: 7, B: LATEST, C: EARLIEST}) == {A: 7, B: 0, C: 2}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({A: 5, B: 0}, "does not name topic b queue 0"),
        ({A: 5}, "queue 1 and 1 more"),
        ({**dict.fromkeys(ENDS, 5), TopicQueue("a", 2): 1}, "names topic a queue 2"),
    ],
)
def test_offsets_name_each_queue_of_the_read_and_no_other(value: object, words: str) -> None:
    with pytest.raises(Rejected, match=words) as refused:
        resolve(Position("startingOffsets", "offset", value), ENDS, never, without_match="error")
    assert refused.value.field == "startingOffsets"


def test_a_time_after_the_last_message_is_refused_or_means_the_end() -> None:
    def found(queue: TopicQueue, time_ms: int) -> int | None:
        return {A: 11}.get(queue)

    position = Position("startingTimestamp", "time", 1_000)
    with pytest.raises(Rejected, match="no message stored at 1000 ms or later") as refused:
        resolve(position, ENDS, found, without_match="error")
    assert refused.value.field == "startingTimestamp"
    assert resolve(position, ENDS, found, without_match="latest") == {A: 11, B: 0, C: 9}


def test_offsets_outside_their_queue_are_an_error_or_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    outside = {A: 3, B: 4, C: 5}
    with pytest.raises(OffsetOutOfRange, match="holds the offsets 5 to 20, not 3") as refused:
        check_ends(outside, ENDS, option="startingOffsets", fail_on_data_loss=True)
    assert (refused.value.min, refused.value.max) == (5, 20)
    with caplog.at_level(logging.WARNING, "raymq"):
        kept = check_ends(outside, ENDS, option="startingOffsets", fail_on_data_loss=False)
    assert kept == {A: 5, B: 0, C: 5}
    assert [record.args[1] for record in caplog.records] == [5, 0]


def test_lost_messages_are_an_error_or_a_warning_with_their_offsets(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lost = QueueRange("a", 1, 0, 3, 8)
    with pytest.raises(OffsetOutOfRange, match="offsets 3 to 7 expired") as refused:
        report_loss(lost, fail=True)
    assert refused.value.field == "failOnDataLoss"
    with caplog.at_level(logging.WARNING, "raymq"):
        report_loss(lost, fail=False)
    assert "topic a queue 1: the messages of the offsets 3 to 7" in caplog.text


# --- admission ------------------------------------------------------------------------------------


def test_a_batch_is_split_in_proportion_to_the_lags() -> None:
    assert split_by_lag({A: 700, B: 200, C: 100}, 100, turn=0) == {A: 70, B: 20, C: 10}
    assert split_by_lag({A: 5, B: 0, C: 2}, 100, turn=0) == {A: 5, C: 2}


def test_a_small_queue_is_not_starved_by_large_ones() -> None:
    assert split_by_lag({A: 10**12, B: 1, C: 1}, 10, turn=0) == {A: 8, B: 1, C: 1}


def test_more_queues_than_messages_take_turns() -> None:
    lags, seen, turn = {A: 9, B: 9, C: 9}, [], 5
    for _ in range(3):
        share = split_by_lag(lags, 1, turn=turn)
        seen += share
        turn += 1
    assert sorted(seen) == [A, B, C]


@given(
    some.lists(some.integers(0, 10**7), min_size=1, max_size=40),
    some.integers(1, 10**6),
    some.integers(0, 10**9),
)
def test_a_share_is_at_most_the_lag_and_all_shares_are_the_limit(
    lags: list[int], limit: int, turn: int
) -> None:
    queues = {TopicQueue("t", number): lag for number, lag in enumerate(lags)}
    share = split_by_lag(queues, limit, turn=turn)
    assert all(1 <= count <= queues[queue] for queue, count in share.items())
    assert sum(share.values()) == min(limit, sum(lags))
    waiting = sum(lag > 0 for lag in lags)
    assert len(share) == min(waiting, limit)


@given(some.lists(some.integers(1, 1000), max_size=8), some.integers(1, 50))
def test_ranges_that_are_split_cover_the_same_messages_once(sizes: list[int], parts: int) -> None:
    whole = [QueueRange("t", number, 0, 10, 10 + size) for number, size in enumerate(sizes)]
    pieces = split_ranges(whole, parts)

    def messages(ranges: list[QueueRange]) -> list[tuple[int, int]]:
        return [(each.queue_id, n) for each in ranges for n in range(each.first, each.last)]

    assert messages(pieces) == messages(whole)
