"""Groups of workers beside those of members, in the process of a leader: one kind at a time, resets and deletions."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from raymq.actors.leader.lock_times import LOCK_EXPIRY_MS
from raymq.store.base.errors import Rejected
from raymq.store.engine.message_store import MessageStore
from raymq.store.groups.leases.entries import ForgetEntry, ResetEntry, SettleOutcome
from raymq.store.groups.leases.lease_table import SETTLE
from raymq.store.groups.leases.packing import pack
from raymq.store.groups.leases.requests import (
    LeaseAnswer,
    LeaseRequest,
    SettleAnswer,
    SettleItem,
    SettleRequest,
    offsets_of,
)
from raymq.store.services.leases import LeaseService
from tests.actors.test_commit_log_host import Shard
from tests.actors.test_group_service import (
    GROUP,
    QUEUES,
    TOPIC,
    committed,
    member_of,
    put_messages,
    reopen,
)
from tests.actors.test_queue_locks import lock, take, with_clock
from tests.support.roles import leader_of
from tests.support.waiting import until

KEY = (TOPIC, 0)


@pytest.fixture
def shard(tmp_path) -> Iterator[Shard]:
    made = Shard(tmp_path / "store")
    made.open()
    made.start_flusher()
    made.host.call("create_topic", {"name": TOPIC, "queues": QUEUES, "shards": [0]})
    put_messages(made.host, 5)
    until(lambda: store_of(made).queue_range(*KEY) == (0, 5), lambda: time.sleep(0.01))
    yield made
    made.close()
    for flusher in made.flushers:
        flusher.kill()
        flusher.wait()


def store_of(shard: Shard) -> MessageStore:
    return leader_of(shard.host).store


def lease(service: LeaseService, request: int, count: int) -> list[int]:
    asked = LeaseRequest(b"s", request, count)
    answer = service.lease(GROUP, asked, [KEY]).plan.answer
    assert isinstance(answer, LeaseAnswer)
    return [offset for part in answer.parts for offset in part.offsets.tolist()]


def ack(service: LeaseService, settle: int, number: int, offsets: list[int]) -> SettleAnswer:
    item = SettleItem(number, KEY, offsets_of(offsets), SettleOutcome.ACKED)
    answer = service.settle(GROUP, SettleRequest(b"s", settle, [item])).plan.answer
    assert isinstance(answer, SettleAnswer)
    return answer


def test_a_topic_is_read_by_members_or_by_workers(shard: Shard):
    service = LeaseService(store_of(shard))
    assert lease(service, 1, 2) == [0, 1]
    member = member_of(shard)
    member.beat()
    with pytest.raises(Rejected, match="workers of group billing have leased messages of orders"):
        member.claim()
    with pytest.raises(Rejected, match="workers of group"):
        shard.host.call("commit_offsets", {"group": GROUP, "topic": TOPIC, "offsets": {"0": 3}})

    assert ack(service, 1, 1, [0, 1]).refused == []
    member.claim()
    with pytest.raises(Rejected, match="stream: workers need another group"):
        lease(service, 2, 2)


def test_a_reset_moves_workers_and_ends_their_leases(shard: Shard):
    service = LeaseService(store_of(shard))
    assert lease(service, 1, 3) == [0, 1, 2]
    asked = {"group": GROUP, "queues": {TOPIC: [0]}, "force": False}
    number = shard.host.call("take_group_number", asked)["number"]
    asked = {"group": GROUP, "topic": TOPIC, "offsets": {"0": 1}, "number": number}
    assert shard.host.call("reset_offsets", asked)["fenced"] == {}
    assert committed(shard.host) == {"0": 1}
    assert [each.offsets.tolist() for each in ack(service, 1, 1, [1]).refused] == [[1]]
    assert lease(service, 2, 1) == [1]


def test_leases_last_over_a_start(shard: Shard):
    service = LeaseService(store_of(shard))
    assert lease(service, 1, 3) == [0, 1, 2]
    ack(service, 1, 1, [0, 2])
    reopen(shard)
    assert committed(shard.host) == {"0": 1}
    service = LeaseService(store_of(shard))
    assert ack(service, 2, 1, [1, 2]).refused[0].offsets.tolist() == [2]
    assert lease(service, 2, 9) == [3, 4]


def test_a_group_that_is_made_again_knows_the_leases_of_the_former_one(shard: Shard):
    service = LeaseService(store_of(shard))
    assert lease(service, 1, 3) == [0, 1, 2]
    leader = leader_of(shard.host)
    leader.claims.forget_offsets(GROUP, 1)
    assert GROUP not in leader.store.leases.groups
    assert lease(service, 1, 1) == [0]
    assert ack(service, 1, 1, [0]).refused[0].offsets.tolist() == [0]
    assert ack(service, 2, 2, [0]).refused == []


def test_a_client_of_rocketmq_locks_no_queue_of_workers(shard: Shard):
    service = LeaseService(store_of(shard))
    assert lease(service, 1, 2) == [0, 1]
    with pytest.raises(Rejected, match="workers of group billing have leased messages of orders"):
        lock(shard, "a", [1])
    ack(service, 1, 1, [0, 1])
    assert lock(shard, "a", [1]) == ([], [1])


def test_a_lock_that_is_over_does_not_keep_workers_away(shard: Shard):
    clock = with_clock(shard)
    service = LeaseService(store_of(shard))
    assert take(shard, "a", [0]) == [0]
    with pytest.raises(Rejected, match="workers need another group"):
        lease(service, 1, 2)
    clock.advance(LOCK_EXPIRY_MS)
    assert lease(service, 1, 2) == [0, 1]


def forget_unused(shard: Shard, unused_since_ms: int = 1 << 60) -> list[str]:
    return leader_of(shard.host).claims.forget_unused(unused_since_ms)


def test_a_group_with_something_left_is_used_and_others_are_forgotten(shard: Shard):
    # Its offset has a time.
    shard.host.call("commit_offsets", {"group": GROUP, "topic": TOPIC, "offsets": {"0": 1}})
    store, service = store_of(shard), LeaseService(store_of(shard))
    assert lease(service, 1, 2) == [1, 2]
    # A lease, then a message that is settled above the low mark, then a session.
    assert forget_unused(shard) == []
    ack(service, 1, 1, [2])
    assert forget_unused(shard) == []
    ack(service, 2, 1, [1])
    assert forget_unused(shard) == []

    store.inner_put.put_state_record(SETTLE, pack(GROUP, [ForgetEntry([b"s"])]))
    used_ms = store.leases.groups[GROUP].used_ms
    assert used_ms >= store.state.offset_times_ms[GROUP, TOPIC] > 0
    assert forget_unused(shard, used_ms - 1) == []
    assert forget_unused(shard, used_ms) == [GROUP]
    assert GROUP not in store.leases.groups
    assert (GROUP, TOPIC) not in store.state.offsets


def test_the_time_of_a_group_of_workers_only_lasts_over_a_start(shard: Shard):
    service = LeaseService(store_of(shard))
    lease(service, 1, 2)
    used_ms = store_of(shard).leases.groups[GROUP].used_ms
    assert (GROUP, TOPIC) not in store_of(shard).state.offset_times_ms
    store_of(shard).begin_next_file()
    reopen(shard)
    assert store_of(shard).leases.groups[GROUP].used_ms == used_ms > 0


def test_a_group_whose_records_have_no_time_is_kept(shard: Shard):
    store = store_of(shard)
    store.inner_put.put_state_record(SETTLE, pack("old", [ResetEntry(KEY, 0)]))
    assert store.leases.groups["old"].used_ms == 0
    assert forget_unused(shard) == []
