"""Consumer groups over a real store: members, claims and commits through the operations of a shard."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import product
from random import Random
from typing import Any

import pytest

from raymq.actors.supervise.replica_host import ReplicaHost
from raymq.store.base.errors import OffsetOutOfRange, Rejected
from raymq.store.groups.heartbeat import Beat, pack_beat
from raymq.store.groups.members import TopicSubscription, matches, shared_topic
from tests.actors.test_commit_log_host import Shard
from tests.support.batches import request
from tests.support.group_members import RawMember
from tests.support.roles import leader_of
from tests.support.waiting import until

GROUP, TOPIC = "billing", "orders"
QUEUES = 4


@pytest.fixture
def shard(tmp_path) -> Iterator[Shard]:
    made = Shard(tmp_path / "store")
    made.open()
    made.start_flusher()
    made.host.call("create_topic", {"name": TOPIC, "queues": QUEUES, "shards": [0]})
    yield made
    made.close()
    for flusher in made.flushers:
        flusher.kill()
        flusher.wait()


def reopen(shard: Shard) -> None:
    shard.close()
    for flusher in shard.flushers:
        flusher.kill()
    shard.open()
    shard.start_flusher()


def member_of(shard: Shard, **facts: Any) -> RawMember:
    # The host may be another one later.
    return RawMember(lambda op, args: shard.host.call(op, args), GROUP, TOPIC, **facts)


def put_messages(host: ReplicaHost, count: int) -> None:
    for queue_id in range(QUEUES):
        (ticket,) = host.put([request([b"x"] * count, topic=TOPIC, queue=queue_id)])
        ticket.wait(10)


def committed(host: ReplicaHost) -> dict[str, int]:
    return host.call("offsets", {"group": GROUP, "topic": TOPIC})


def test_a_member_that_is_alone_gets_every_queue(shard: Shard):
    member = member_of(shard)
    answer = member.beat()
    assert sorted(member.numbers) == [0, 1, 2, 3]
    assert answer["session_ms"] == 15_000
    assert "assignment" not in member.beat()


def test_members_that_join_together_are_one_step(shard: Shard):
    members = [member_of(shard) for _ in range(4)]
    threads = [threading.Thread(target=each.beat) for each in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(queue_id for each in members for queue_id in each.numbers) == [0, 1, 2, 3]
    assert all(len(each.numbers) == 1 for each in members)


def test_a_second_member_gets_its_half_after_the_first_has_released_it(shard: Shard):
    first, second = member_of(shard), member_of(shard)
    first.beat()
    kept = dict(first.numbers)
    assert second.beat()["interval_ms"] == 300
    assert second.numbers == {}

    first.beat()
    assert len(first.numbers) == 2
    assert first.numbers.items() <= kept.items()
    second.beat()
    assert second.numbers == {}

    first.beat()
    second.beat()
    assert sorted({**first.numbers, **second.numbers}) == [0, 1, 2, 3]
    assert max(kept.values()) < min(second.numbers.values())


def test_a_member_that_leaves_gives_its_queues_to_the_others(shard: Shard):
    first, second = member_of(shard), member_of(shard)
    first.beat()
    second.beat()
    first.beat(is_leaving=True)
    second.beat()
    assert sorted(second.numbers) == [0, 1, 2, 3]
    assert "Join again" in first.beat()["error"]["message"]


def test_a_silent_member_is_removed_when_its_session_is_over(shard: Shard):
    silent = member_of(shard, session_timeout_ms=1_000)
    silent.beat()
    other = member_of(shard)
    other.beat()
    until(lambda: len(other.numbers) == QUEUES, other.beat)
    assert silent.beat()["error"]["kind"] == "Fenced"


def test_a_claim_names_where_the_group_goes_on_and_fences_the_owner_before(shard: Shard):
    put_messages(shard.host, 5)
    first, second = member_of(shard), member_of(shard)
    first.beat()
    assert first.claim() == {"offsets": {}, "fenced": {}}
    assert first.commit({0: 3, 1: 5}) == {"fenced": {}}
    before = dict(first.numbers)
    first.beat(is_leaving=True)

    second.beat()
    assert second.claim() == {"offsets": {"0": 3, "1": 5}, "fenced": {}}
    first.numbers = before
    refused = first.commit({0: 4})
    assert refused == {"fenced": {"0": [second.numbers[0], second.id]}}
    assert first.claim()["fenced"].keys() == {"0", "1", "2", "3"}
    assert committed(shard.host) == {"0": 3, "1": 5}


def test_a_lower_offset_is_stored_only_by_a_seek(shard: Shard):
    put_messages(shard.host, 5)
    member = member_of(shard)
    member.beat()
    member.claim()
    member.commit({0: 4})
    member.commit({0: 2})
    assert committed(shard.host) == {"0": 4}
    member.commit({0: 2}, seeks=[0])
    assert committed(shard.host) == {"0": 2}


def test_a_commit_beyond_the_end_is_refused(shard: Shard):
    member = member_of(shard)
    member.beat()
    member.claim()
    with pytest.raises(OffsetOutOfRange):
        member.commit({0: 1})


def test_a_consumer_that_is_no_member_cannot_commit_for_a_queue_of_a_member(shard: Shard):
    put_messages(shard.host, 5)
    member = member_of(shard)
    member.beat()
    member.claim()
    asked = {"group": GROUP, "topic": TOPIC, "offsets": {"0": 3}}
    with pytest.raises(Rejected, match=f"belongs to member {member.id}"):
        shard.host.call("commit_offsets", asked)
    shard.host.call("commit_offsets", {**asked, "group": "audit"})


def test_members_with_unequal_filters_are_refused(shard: Shard):
    member_of(shard).beat()
    other = member_of(shard)
    assert other.join is not None
    other.join = other.join._replace(filter_kind="TAG", expression="a")
    error = other.beat()["error"]
    assert error["kind"] == "Rejected"
    assert "All members of a group have one filter" in error["message"]


def reader_of(shard: Shard, pattern: str = "", tag: str = "", topic: str = "") -> RawMember:
    names = (topic,) if topic else ()
    member = member_of(shard, subscription=TopicSubscription(names, pattern))
    assert member.join is not None
    if tag:
        member.join = member.join._replace(filter_kind="TAG", expression=tag)
    return member


def test_a_filter_counts_for_topics_that_are_made_later(shard: Shard):
    reader_of(shard, "logs-*", "a").beat()
    shard.host.call("create_topic", {"name": "logs-x", "queues": 1, "shards": [0]})
    error = reader_of(shard, topic="logs-x").beat()["error"]
    refusal = "reads logs-x with the TAG filter 'a', and this member wants no filter"
    assert refusal in error["message"]
    assert "error" not in reader_of(shard, "logs-*", "a").beat()
    assert "error" not in reader_of(shard, "new-*", "b").beat()
    # These two have no topic yet.
    assert "error" in reader_of(shard, "*-eu", "a").beat()
    assert "error" in reader_of(shard, topic="new-one").beat()
    assert "error" not in reader_of(shard, topic="new-one", tag="b").beat()
    described = shard.host.call("describe_group", {"group": GROUP})
    assert described["topics"] == ["logs-x", "new-one"]

    reopen(shard)
    assert "one filter" in reader_of(shard, "new-t*").beat()["error"]["message"]


def test_a_pattern_may_have_another_filter_when_its_last_member_has_left(shard: Shard):
    first = reader_of(shard, "logs-*", "a")
    first.beat()
    assert "error" in reader_of(shard, "logs-*", "b").beat()
    first.beat(is_leaving=True)
    assert "error" not in reader_of(shard, "logs-*", "b").beat()
    assert "error" in reader_of(shard, "logs-*", "a").beat()


def test_patterns_share_a_topic_if_a_name_matches_both():
    random = Random(10)
    names = ["".join(each) for n in range(1, 8) for each in product("ab", repeat=n)]
    for _ in range(300):
        one, other = ("".join(random.choices("ab*", k=random.randint(1, 4))) for _ in range(2))
        expected = any(matches(name, one) and matches(name, other) for name in names)
        found = shared_topic(TopicSubscription((), one), TopicSubscription((), other))
        assert (found is not None) is expected, (one, other)
    for names_of, pattern, shared in ((("b", "c"), "c*", "c"), (("b",), "c*", None)):
        both = TopicSubscription(names_of), TopicSubscription((), pattern)
        assert shared_topic(*both) == shared_topic(*reversed(both)) == shared
    assert shared_topic(TopicSubscription(("a", "b")), TopicSubscription(("b", "c"))) == "b"
    assert shared_topic(TopicSubscription((), "*b"), TopicSubscription((), "%*b")) is None


def test_a_process_that_kept_a_queue_joins_again_beside_its_own_old_membership(shard: Shard):
    old = member_of(shard, instance_id="i", revoke_timeout_ms=0)
    old.beat()
    kept = dict(old.numbers)
    other = member_of(shard)
    other.beat()
    old.beat()
    old.numbers = kept
    assert "revoke_timeout_s" in old.beat()["error"]["message"]

    again = rejoining(shard, old)
    assert "error" not in again.beat()
    # The old membership keeps its queues until its session ends.
    assert again.numbers == other.numbers == {}
    queues = shard.host.call("describe_group", {"group": GROUP})["queues"]
    assert {each["queue_id"]: each["member"] for each in queues} == dict.fromkeys(kept, old.id)
    # Also when the answer to one of the joins was lost.
    assert "error" not in rejoining(shard, old, again, member_of(shard)).beat()


def test_a_process_that_joins_again_does_not_replace_a_newer_one(shard: Shard):
    old, newer = (member_of(shard, instance_id="i") for _ in range(2))
    old.beat()
    newer.beat()
    assert "this one is replaced" in rejoining(shard, old).beat()["error"]["message"]


def rejoining(shard: Shard, *earlier: RawMember) -> RawMember:
    """A member of a process that was these members."""
    member = member_of(shard, instance_id="i")
    assert member.join is not None
    replaces = tuple(each.id for each in earlier)
    member.join = member.join._replace(is_again=True, replaces=replaces)
    return member


def test_groups_claims_and_offsets_are_there_again_after_a_restart(shard: Shard):
    put_messages(shard.host, 5)
    member = member_of(shard)
    member.beat()
    member.claim()
    leader_of(shard.host).store.begin_next_file()
    member.commit({2: 3})
    reopen(shard)

    before = dict(member.numbers)
    answer = member.beat()
    assert "error" not in answer
    assert member.numbers == before
    assert member.claim() == {"offsets": {"2": 3}, "fenced": {}}
    later = member_of(shard)
    later.beat()
    assert leader_of(shard.host).store.groups.number > max(before.values())


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"group": "a b"}, "group"),
        ({"member": "x"}, "member"),
        ({"version": -1}, "version"),
        ({"leaving": 1}, "leaving"),
        ({"owned": {"t": [[0], []]}}, "owned"),
        ({"owned": {"t": [[-1], [1]]}}, "owned"),
        ({"join": {}}, "join"),
        ({"more": 1}, "beats"),
    ],
)
def test_a_malformed_heartbeat_names_its_field(shard: Shard, change, field):
    fields = {**pack_beat(GROUP, Beat("0" * 32, join=member_of(shard).join)), **change}
    with pytest.raises(Rejected) as raised:
        shard.host.call("group_beat", {"beats": [fields]})
    assert raised.value.field == field


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"topics": ["a"] * 1_001}, "topics"),
        ({"topics": [], "pattern": ""}, "topics"),
        ({"topics": ["a"], "pattern": "b*"}, "topics"),
        ({"instance": "i" * 256}, "instance"),
        ({"session_ms": 1}, "session_timeout_s"),
        ({"revoke_ms": -1}, "revoke_timeout_s"),
        ({"kind": "workers"}, "kind"),
        ({"filter": ["SQL92", "price >"]}, "filter"),
        ({"replaces": ["x"]}, "member"),
        ({"replaces": ["0" * 32] * 9}, "replaces"),
    ],
)
def test_a_malformed_join_names_its_field(shard: Shard, change, field):
    fields = pack_beat(GROUP, Beat("0" * 32, join=member_of(shard).join))
    fields["join"] |= change
    with pytest.raises(Rejected) as raised:
        shard.host.call("group_beat", {"beats": [fields]})
    assert raised.value.field == field
