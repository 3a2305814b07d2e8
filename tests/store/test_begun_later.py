"""A new, empty follower of a log whose oldest files are deleted begins where that log begins, with a snapshot."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from raymq.store.base.errors import Bug, OffsetOutOfRange, Unavailable
from raymq.store.engine.message_store import MessageStore
from raymq.store.index.index_builder import IndexBuilder
from tests.store.test_followed_log import (
    bodies,
    confirm_upto,
    followed,
    open_follower,
    open_leader,
    put_some,
    send,
    state_of,
)
from tests.support.batches import request
from tests.support.confirming import confirm
from tests.support.simulated_disk import SimulatedDisk


@pytest.fixture
def leader() -> Iterator[MessageStore]:
    """A leader that has deleted its first two files, with a queue of which no message is left."""
    store = open_leader()
    store.topics.create("gone", 1, [0])
    store.put(request([b"gone"] * 4, topic="gone"))
    for turn in range(16):
        put_some(store, 12, first_sequence=30 * turn)
    confirm(store)
    store.log.sync()
    delete_first_file(store)
    delete_first_file(store)
    assert store.queue_range("gone", 0) == (4, 4)
    yield store
    store.abandon()


def delete_first_file(store: MessageStore) -> None:
    store.log.delete_first()
    store.retention.forget_before(store.log.start)
    store.retention.delete_derived(store.log.start)


def begin(leader: MessageStore, follower: MessageStore) -> None:
    (first,) = leader.log.chain.units(leader.log.start, leader.log.start + 1)
    follower.begin_at(first.start, first.previous, epoch=0)


def adopt_first_file(leader: MessageStore, follower: MessageStore) -> None:
    """The match is found at the start: a power loss may take chain units, and others are made of the records."""
    start = leader.log.start
    units = leader.log.chain.units(start, start + leader.config.segment_size_bytes)
    assert follower.log.chain.value_at(start) == units[0].previous
    data = memoryview(leader.log.reads.raw(start, units[-1].end))
    followed(follower).adopt_units(units, data)


def ranges(store: MessageStore) -> dict[tuple[str, int], tuple[int, int]]:
    return {key: store.queue_range(*key) for key in store.queues()}


def check_equal(leader: MessageStore, follower: MessageStore) -> None:
    confirm_upto(follower, send(leader, follower))
    assert state_of(follower) == state_of(leader)
    assert ranges(follower) == ranges(leader)
    assert bodies(follower) == bodies(leader)
    assert follower.log.start == leader.log.start
    assert follower.log.chain.value == leader.log.chain.value


def test_state_and_queues_are_the_leaders_also_those_without_a_message(
    leader: MessageStore,
) -> None:
    follower = open_follower(SimulatedDisk())
    begin(leader, follower)
    assert (follower.log.start, follower.log.end) == (leader.log.start, leader.log.start)
    assert follower.log.is_empty
    check_equal(leader, follower)
    assert follower.state_is_whole
    with pytest.raises(OffsetOutOfRange) as caught:
        follower.fetch("gone", 0, 3, max_bytes=1, max_records=1)
    assert (caught.value.min, caught.value.max) == (4, 4)


def test_it_leads_with_the_offsets_and_sequences_of_the_deleted_messages(
    leader: MessageStore,
) -> None:
    follower = open_follower(SimulatedDisk())
    begin(leader, follower)
    check_equal(leader, follower)
    follower.lead(2)
    assert follower.put(request([b"next"], topic="gone")).first_offset == 4
    again = follower.put(request([b"11"] * 5, queue=1, producer_id=9, sequence=475))
    assert again.duplicates == 5


def test_it_leads_before_the_snapshot_was_dispatched(leader: MessageStore) -> None:
    follower = open_follower(SimulatedDisk())
    begin(leader, follower)
    send(leader, follower)
    follower.log.sync()
    follower.lead(2)
    follower.log.sync()
    follower.log.note_confirmed(follower.log.end)
    while follower.dispatched < follower.log.end:
        follower.dispatch(follower.log.end)
    assert follower.queue_range("gone", 0) == (4, 4)
    assert bodies(follower)["t", 0] == bodies(leader)["t", 0]


def test_a_restart_at_any_unit_goes_on_and_begins_every_queue(leader: MessageStore) -> None:
    units = leader.log.chain.units(leader.log.start, leader.log.end)
    for count in [*range(5), len(units) // 2]:
        disk = SimulatedDisk()
        follower = open_follower(disk)
        begin(leader, follower)
        for unit in units[:count]:
            data = memoryview(leader.log.reads.raw(unit.start, unit.end))
            followed(follower).append_units([unit], data)
            confirm_upto(follower, unit.end)
        follower.abandon()

        again = open_follower(disk)
        assert again.log.start == leader.log.start
        if again.log.is_empty:
            begin(leader, again)
        check_equal(leader, again)
        again.abandon()


@pytest.mark.thorough
def test_every_power_loss_leaves_an_empty_log_or_one_that_begins_there(
    leader: MessageStore,
) -> None:
    disk = SimulatedDisk(record=True)
    follower = open_follower(disk)
    begin(leader, follower)
    delete_first_file(leader)
    begin(leader, follower)
    confirm_upto(follower, send(leader, follower))
    follower.sync_queues()
    follower.abandon()

    starts = set()
    for state in disk.crash_states(limit_per_point=2):
        again = open_follower(state)
        starts.add((again.log.start, again.log.is_empty))
        if again.log.is_empty:
            begin(leader, again)
        adopt_first_file(leader, again)
        check_equal(leader, again)
        again.abandon()
    begun = leader.log.start
    assert starts == {
        (0, True),
        (begun - leader.config.segment_size_bytes, True),
        (begun, True),
        (begun, False),
    }


def test_a_leader_that_begins_at_0_is_followed_after_every_power_loss_too(
    leader: MessageStore,
) -> None:
    disk = SimulatedDisk(record=True)
    follower = open_follower(disk)
    begin(leader, follower)
    follower.abandon()
    other = open_leader()
    put_some(other, 6)
    confirm(other)

    ends = set()
    for state in disk.crash_states(limit_per_point=4):
        again = open_follower(state)
        ends.add(again.log.end)
        assert again.log.is_empty
        if again.log.end:
            again.begin_at(0, 0, epoch=0)
        check_equal(other, again)
        again.abandon()
    assert ends == {0, leader.log.start}


def test_records_below_an_earlier_start_are_indexed(leader: MessageStore) -> None:
    follower = open_follower(SimulatedDisk())
    begin(leader, follower)
    follower.dispatch(0)
    follower.begin_at(0, 0, epoch=0)
    other = open_leader()
    put_some(other, 6)
    confirm_upto(follower, send(other, follower))
    while follower.reput.index_behind:
        follower.dispatch(follower.log.end)
    assert follower.index.indexed == follower.log.end
    index = follower.reput.index
    assert isinstance(index, IndexBuilder)
    assert index._added_end == follower.log.end


def test_a_start_opens_no_queue_that_has_messages(leader: MessageStore) -> None:
    disk = SimulatedDisk()
    follower = open_follower(disk)
    begin(leader, follower)
    check_equal(leader, follower)
    # The first start after the queues were begun opens all of them.
    for _ in range(2):
        follower.close()
        follower = open_follower(disk)
    assert follower.consume_queues.is_unopened("t", 0)
    assert ranges(follower) == ranges(leader)


def test_it_begins_again_where_a_leader_begins_that_has_deleted_more(leader: MessageStore) -> None:
    disk = SimulatedDisk()
    follower = open_follower(disk)
    begin(leader, follower)
    follower.log.sync()
    follower.log.note_synced(follower.log.end)
    delete_first_file(leader)
    begin(leader, follower)
    check_equal(leader, follower)
    follower.abandon()
    again = open_follower(disk)
    assert state_of(again) == state_of(leader)


def test_a_log_with_records_begins_nowhere_else(leader: MessageStore) -> None:
    follower = open_follower(SimulatedDisk())
    begin(leader, follower)
    send(leader, follower)
    with pytest.raises(Bug, match="empty log"):
        begin(leader, follower)
    empty = open_follower(SimulatedDisk())
    with pytest.raises(Bug, match="begins with a file"):
        empty.begin_at(100, 0, epoch=0)
    empty.log.epoch_floor = 3
    with pytest.raises(Unavailable, match="epoch 1"):
        empty.begin_at(32 * 1024, 0, epoch=1)
    assert (empty.log.start, empty.log.end) == (0, 0)
