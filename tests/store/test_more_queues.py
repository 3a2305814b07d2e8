"""Queues that are added to a topic: what is refused, and what the log and its snapshots keep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from raymq.store.base.errors import Rejected, TopicOnOtherShards, TopicWithOtherQueues
from raymq.store.state.shard_state import (
    CLEANUP_POLICY,
    COMPACTION,
    TOPIC,
    ShardState,
    TopicInfo,
    topic_body,
)
from raymq.store.state.topics import QUEUES_MAX, check_more_queues, check_new_topic

PLAIN = TopicInfo("t", 4, (0, 1))


def grown(
    topic: TopicInfo, queues: int, shards: tuple[int, ...] = (0, 1), *, are_hidden: bool = False
) -> TopicInfo | None:
    return check_more_queues("t", queues, shards, {"t": topic}, are_hidden=are_hidden)


def kept(topic: TopicInfo) -> TopicInfo:
    """The topic as a log and a snapshot give it back."""
    state = ShardState()
    state.apply_state_record(TOPIC, topic_body(topic))
    copy = ShardState()
    copy._restore([list(state._small_rows())])
    assert copy.topics == state.topics
    return state.topics[topic.name]


def test_queues_are_hidden_until_every_shard_has_them() -> None:
    hidden = grown(PLAIN, 8, are_hidden=True)
    assert hidden is not None
    assert hidden.shown() == {"queues": 4, "shards": [0, 1], "former_queues": [4], "all_queues": 8}
    shown = grown(hidden, 8)
    assert shown is not None
    assert shown.shown() == {"queues": 8, "shards": [0, 1], "former_queues": [4]}
    for topic in (PLAIN, hidden, shown):
        assert kept(topic) == topic


def test_each_step_may_be_repeated_in_any_order() -> None:
    hidden = grown(PLAIN, 8, are_hidden=True)
    assert hidden is not None
    assert grown(hidden, 8, are_hidden=True) is None
    shown = grown(hidden, 8)
    assert shown is not None
    assert grown(shown, 8) is None
    assert grown(shown, 8, are_hidden=True) is None
    assert grown(PLAIN, 4) is None


def test_a_second_growth_remembers_both_numbers() -> None:
    once = grown(PLAIN, 6)
    assert once is not None
    twice = grown(once, 8, are_hidden=True)
    assert twice is not None
    assert (twice.former_queues, twice.hidden_queues) == ((4, 6), 2)


def test_a_topic_that_grew_may_be_created_again_with_its_queues_and_with_the_former_ones() -> None:
    topic = grown(PLAIN, 8)
    assert topic is not None
    for queues in (8, 4):
        assert check_new_topic("t", queues, (0, 1), {"t": topic}) is None
    with pytest.raises(TopicWithOtherQueues, match="exists with 8 queues") as other:
        check_new_topic("t", 5, (0, 1), {"t": topic})
    assert (other.value.field, other.value.limit, other.value.queues) == ("queues", 8, 8)
    with pytest.raises(TopicOnOtherShards, match="exists with 8 queues") as moved:
        check_new_topic("t", 8, (0, 1, 2), {"t": topic})
    assert (moved.value.field, moved.value.limit, moved.value.shards) == ("shards", [0, 1], [0, 1])
    with pytest.raises(Rejected, match="exists with 8 queues"):
        check_new_topic("t", 4, (0, 1), {"t": topic}, {CLEANUP_POLICY: COMPACTION})


@pytest.mark.parametrize(
    ("topic", "queues", "shards", "field", "words"),
    [
        (PLAIN, 3, (0, 1), "queues", "has 4 queues"),
        (PLAIN, QUEUES_MAX + 1, (0, 1), "queues", "up to 65536"),
        (PLAIN, 8, (0, 1, 2), "shards", "queue 2 of topic t would move from shard 0 to shard 2"),
        (TopicInfo("t", 4, (0,), ((CLEANUP_POLICY, COMPACTION),)), 8, (0,), "topic", "compacted"),
    ],
)
def test_a_growth_that_would_lose_or_move_something_is_refused(
    topic: TopicInfo, queues: int, shards: tuple[int, ...], field: str, words: str
) -> None:
    with pytest.raises(Rejected, match=words) as caught:
        grown(topic, queues, shards)
    assert caught.value.field == field


def test_only_a_topic_of_users_gets_queues() -> None:
    known: Mapping[str, Any] = {"rmq_sys_x": TopicInfo("rmq_sys_x", 1, (0,))}
    with pytest.raises(Rejected, match="system topic"):
        check_more_queues("rmq_sys_x", 2, (0,), known, are_hidden=True)
    with pytest.raises(Rejected, match="does not exist"):
        check_more_queues("u", 2, (0,), known, are_hidden=True)
