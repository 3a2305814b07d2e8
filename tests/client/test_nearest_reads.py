"""Reads from the nearest replica: a real leader and real followers, over real Flight."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raymq.actors.api.call_arguments import NUMBER_MAX, fetch_request
from raymq.client.consume.async_consumer import AsyncConsumer
from raymq.client.consume.consumer import Consumer
from raymq.client.consume.consumer_config import ConsumerConfig
from raymq.client.consume.range_reader import read_range
from raymq.client.transport import nearest as nearest_module
from raymq.client.transport.actor_names import actor_name
from raymq.client.transport.locality import is_local
from raymq.client.transport.nearest import NearestReplicas
from raymq.client.transport.routes import Routes
from raymq.store.base.errors import (
    Corrupt,
    NotLeading,
    NotServing,
    OffsetOutOfRange,
    Rejected,
    ReplicaBehind,
    Unavailable,
)
from raymq.store.records.requests import FetchRequest
from tests.support.damaged_store import FIRST_LOG, flip
from tests.support.followed_shard import FollowedShard
from tests.support.waiting import until

#: in a record of these tests: a byte of its short body
BODY_AT = 88


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[FollowedShard]:
    made = FollowedShard(tmp_path)
    yield made
    made.close()


@pytest.fixture
def make(shard: FollowedShard) -> Iterator[Callable[..., Consumer]]:
    made: list[Consumer] = []

    def consumer(**options: Any) -> Consumer:
        wanted = {"start": "earliest", "read_from": "nearest", **options}
        made.append(Consumer(shard.cluster, "t", **wanted))
        return made[-1]

    yield consumer
    for each in made:
        each.close()


def bodies(start: int, count: int) -> list[bytes]:
    return [b"%d" % number for number in range(start, start + count)]


def pause() -> None:
    threading.Event().wait(0.01)


def wait_for_followers(shard: FollowedShard, end: int, *numbers: int) -> None:
    for number in numbers or (1, 2):
        until(lambda each=number: shard.end_of(each) >= end, pause)


def read(consumer: Consumer, count: int) -> list[bytes]:
    found: list[bytes] = []
    until(lambda: len(found) >= count, lambda: found.extend(m.body for m in consumer.poll(100, 5)))
    return found


def test_a_consumer_reads_from_followers_and_only_one_that_says_so_does(
    shard: FollowedShard, make: Callable[..., Consumer]
) -> None:
    shard.put(*bodies(0, 10))
    wait_for_followers(shard, 10)
    consumer = make()
    assert read(consumer, 10) == bodies(0, 10)
    shard.put(*bodies(10, 5))
    assert read(consumer, 5) == bodies(10, 5)
    assert shard.fetches[0] == 0

    asked = dict(shard.fetches)
    consumer.close()
    assert read(make(read_from="leader"), 15) == bodies(0, 15)
    assert shard.fetches[0] > 0
    assert [shard.fetches[n] - asked[n] for n in (1, 2)] == [0, 0]


# --- what a follower refuses ----------------------------------------------------------------------


def fetch(shard: FollowedShard, number: int, offset: int, seen_epoch: int | None = 0) -> Any:
    """A fetch at a follower, of its process."""
    wanted = FetchRequest("t", {0: offset}, 1 << 20, 100, 0, seen_epoch)
    return shard.followers[number].host.fetch(wanted)


def check_refused(
    shard: FollowedShard, offset: int, kind: type[Unavailable], seen_epoch: int | None = 0
) -> None:
    with pytest.raises(Unavailable) as refused:
        fetch(shard, 1, offset, seen_epoch)
    assert type(refused.value) is kind


def test_a_follower_serves_only_readers_that_say_what_they_have_seen(shard: FollowedShard) -> None:
    shard.put(*bodies(0, 3))
    wait_for_followers(shard, 3)
    check_refused(shard, 0, NotLeading, seen_epoch=None)
    epoch = shard.leader.elections.epoch
    for seen_epoch in (0, epoch):
        (part,) = fetch(shard, 1, 0, seen_epoch)
        assert (part.next_offset, part.error, part.epoch) == (3, None, epoch)
    assert fetch(shard, 1, 3) == []


def test_a_reader_ends_the_linger_time_of_a_followers_dispatch(shard: FollowedShard) -> None:
    shard.put(*bodies(0, 3))
    wait_for_followers(shard, 3)
    dispatcher, store = shard.followers[1].host.dispatcher, shard.followers[1].host.store

    def dispatch() -> None:
        pause()
        dispatcher.await_dispatched(store.log.confirmed, 1_000)

    dispatcher.linger_s = 60.0
    # The linger time of before may still run. It ends with this message, and the next one waits.
    shard.put(*bodies(3, 1))
    until(lambda: shard.end_of(1) == 4, dispatch)
    shard.put(*bodies(4, 1))
    until(lambda: store.log.confirmed > store.dispatched, pause)
    # The reader has seen the message at another replica.
    assert fetch(shard, 1, 5) == []
    (part,) = fetch(shard, 1, 4)
    assert part.next_offset == 5


def test_a_follower_that_is_behind_the_reader_never_answers_with_its_own_end(
    shard: FollowedShard,
) -> None:
    shard.put(*bodies(0, 3))
    wait_for_followers(shard, 3)
    check_refused(shard, 4, ReplicaBehind)
    check_refused(shard, 3, ReplicaBehind, seen_epoch=shard.leader.elections.epoch + 1)


def test_the_end_of_a_queue_whose_messages_were_all_deleted_is_known_without_its_file(
    shard: FollowedShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard.put(*bodies(0, 3))
    wait_for_followers(shard, 3)
    # As of a replica that was replaced: its log begins with a snapshot that knows only where the queue goes on.
    store = shard.followers[1].host.store
    monkeypatch.setattr(store, "queue_range", lambda topic, queue_id: (0, 0))
    assert fetch(shard, 1, 3) == []
    check_refused(shard, 2, ReplicaBehind)
    check_refused(shard, 4, ReplicaBehind)


@pytest.mark.parametrize("fate", ["lags", "is_cut"])
def test_a_follower_that_lags_or_hears_no_leader_does_not_say_that_nothing_is_new(
    shard: FollowedShard, fate: str
) -> None:
    shard.put(*bodies(0, 3))
    wait_for_followers(shard, 3)
    getattr(shard.followers[1], fate).set()
    shard.put(*bodies(3, 3))
    wait_for_followers(shard, 6, 2)

    refused: list[str | None] = []

    def ask() -> None:
        # As long as it answers, its empty answer is at most a second old.
        try:
            assert fetch(shard, 1, 3) == []
        except Unavailable as error:
            refused.append(error.field)
        pause()

    until(lambda: bool(refused), ask)
    assert refused == ["replica"]
    assert shard.end_of(1) == 3
    getattr(shard.followers[1], fate).clear()
    wait_for_followers(shard, 6, 1)
    (part,) = fetch(shard, 1, 3)
    assert part.next_offset == 6


def test_a_follower_whose_copy_is_not_whole_serves_no_reads(
    shard: FollowedShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard.put(*bodies(0, 3))
    wait_for_followers(shard, 3)
    host = shard.followers[1].host
    with monkeypatch.context() as patch:
        patch.setattr(host.scrub, "faults", [Corrupt("rotten", offset=0, rule="bad body CRC")])
        check_refused(shard, 0, Unavailable)
    with monkeypatch.context() as patch:
        patch.setattr(type(host.elections), "is_complete", False)
        check_refused(shard, 0, Unavailable)
    with monkeypatch.context() as patch:
        patch.setattr(host.serving, "stop_error", Unavailable("the disk failed"))
        check_refused(shard, 0, NotServing)
    assert len(fetch(shard, 1, 0)) == 1


def test_a_topic_that_only_the_leader_knows_is_refused_without_a_last_word(
    shard: FollowedShard,
) -> None:
    wait_for_followers(shard, 0)
    for topic, queue_id in (("unknown", 0), ("t", 7)):
        wanted = FetchRequest(topic, {queue_id: 0}, 1 << 20, 100, 0, 0)
        until(lambda: "t" in shard.followers[1].host.store.state.topics, pause)
        with pytest.raises(Unavailable) as refused:
            shard.followers[1].host.fetch(wanted)
        assert refused.value.field == "replica"


def test_a_leader_that_hears_of_a_newer_epoch_from_a_reader_serves_it_not(
    shard: FollowedShard,
) -> None:
    shard.put(*bodies(0, 1))
    epoch = shard.leader.elections.epoch
    wanted = FetchRequest("t", {0: 0}, 1 << 20, 100, 0, epoch)
    assert [part.epoch for part in shard.leader.fetch(wanted)] == [epoch]
    with pytest.raises(Unavailable, match="does not lead"):
        shard.leader.fetch(wanted._replace(seen_epoch=epoch + 1))


# --- a reader changes the replica -----------------------------------------------------------------


def test_a_reader_that_has_seen_more_than_the_followers_waits_or_reads_the_leader(
    shard: FollowedShard, make: Callable[..., Consumer]
) -> None:
    for follower in shard.followers.values():
        follower.lags.set()
    shard.put(*bodies(0, 5))
    consumer = make(start={0: 3})
    assert read(consumer, 2) == bodies(3, 2)
    assert shard.fetches[0] > 0
    assert consumer.position(0) == 5


def test_a_reader_leaves_a_follower_that_lags_and_gets_what_is_new(
    shard: FollowedShard, make: Callable[..., Consumer]
) -> None:
    shard.put(*bodies(0, 3))
    wait_for_followers(shard, 3)
    consumer = make()
    assert read(consumer, 3) == bodies(0, 3)
    for follower in shard.followers.values():
        follower.lags.set()
    shard.put(*bodies(3, 3))
    assert read(consumer, 3) == bodies(3, 3)


@pytest.mark.parametrize("fate", ["dead", "hangs"])
def test_a_reader_leaves_a_follower_that_is_gone_without_an_error(
    shard: FollowedShard, make: Callable[..., Consumer], fate: str
) -> None:
    shard.put(*bodies(0, 3))
    wait_for_followers(shard, 3)
    consumer = make(unavailable_timeout_ms=0)
    assert read(consumer, 3) == bodies(0, 3)
    for number in (1, 2):
        proxy = shard.proxies[number]
        proxy.close() if fate == "dead" else proxy.freeze()
    shard.put(*bodies(3, 3))
    found: list[bytes] = []
    until(lambda: len(found) >= 3, lambda: found.extend(m.body for m in consumer.poll(100, 5)))
    assert found == bodies(3, 3)
    assert shard.fetches[0] > 0


def test_a_reader_returns_to_a_follower_that_is_back(
    shard: FollowedShard, make: Callable[..., Consumer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nearest_module, "RETRY_MS", 10)
    monkeypatch.setattr(nearest_module, "RETRY_MS_MAX", 20)
    shard.put(*bodies(0, 3))
    wait_for_followers(shard, 3)
    for number in (1, 2):
        shard.proxies[number].cut(refuse=True)
    consumer = make()
    assert read(consumer, 3) == bodies(0, 3)
    for number in (1, 2):
        shard.proxies[number].mend()

    asked = shard.fetches[1] + shard.fetches[2]
    found: list[bytes] = []

    def put_and_read() -> None:
        shard.put(*bodies(3 + len(found), 1))
        found.extend(read(consumer, 1))

    until(lambda: shard.fetches[1] + shard.fetches[2] > asked, put_and_read)
    assert found == bodies(3, len(found))


def test_an_offset_that_a_follower_has_deleted_is_read_from_the_leader(
    shard: FollowedShard, make: Callable[..., Consumer], monkeypatch: pytest.MonkeyPatch
) -> None:
    shard.put(*bodies(0, 5))
    wait_for_followers(shard, 5)
    for follower in shard.followers.values():
        monkeypatch.setattr(follower.host.store, "queue_range", lambda topic, queue_id: (2, 5))
    assert read(make(start={0: 2}), 3) == bodies(2, 3)
    assert shard.fetches[0] == 0
    assert read(make(), 5) == bodies(0, 5)
    assert shard.fetches[0] > 0


def test_only_the_leader_says_that_an_offset_is_out_of_range(
    shard: FollowedShard, make: Callable[..., Consumer]
) -> None:
    shard.put(*bodies(0, 5))
    wait_for_followers(shard, 5)
    with pytest.raises(OffsetOutOfRange) as refused:
        make(start={0: 9}).poll(10, 30)
    assert (refused.value.min, refused.value.max) == (0, 5)
    assert shard.fetches[0] > 0


def test_a_damaged_copy_of_a_follower_is_read_from_another_replica_and_checked(
    shard: FollowedShard, make: Callable[..., Consumer], monkeypatch: pytest.MonkeyPatch
) -> None:
    shard.put(*bodies(0, 50))
    wait_for_followers(shard, 50)
    checked: list[tuple[str, int, int]] = []
    for follower in shard.followers.values():
        store = follower.host.store
        units = store.consume_queues.get("t", 0).read(30, 1)
        flip(follower.host.root / FIRST_LOG, int(units["position"][0]) + BODY_AT)
        monkeypatch.setattr(store, "check_record", lambda *place: checked.append(place))
    assert read(make(), 50) == bodies(0, 50)
    assert shard.fetches[0] > 0
    # The reader has asked each follower to check that message.
    until(lambda: len(checked) == len(shard.followers), pause)
    assert set(checked) == {("t", 0, 30)}


def test_a_range_is_read_from_followers_and_from_the_leader_without_them(
    shard: FollowedShard,
) -> None:
    shard.put(*bodies(0, 10))
    wait_for_followers(shard, 10)

    def count() -> int:
        pieces = read_range(shard.cluster, "t", 0, 0, 0, 10, timeout_s=30, read_from="nearest")
        return sum(len(piece) for piece in pieces)

    assert count() == 10
    assert shard.fetches[0] == 0
    for number in (1, 2):
        shard.proxies[number].cut(refuse=True)
    assert count() == 10
    assert shard.fetches[0] > 0


def test_offsets_are_committed_at_the_leader(
    shard: FollowedShard, make: Callable[..., Consumer]
) -> None:
    shard.put(*bodies(0, 3))
    wait_for_followers(shard, 3)
    consumer = make(group="g")
    assert read(consumer, 3) == bodies(0, 3)
    consumer.commit()
    assert shard.leader.store.state.offsets["g", "t"] == {0: 3}
    consumer.seek(0, "latest")
    assert consumer.position(0) == 3
    assert shard.fetches[0] == 0


def test_a_consumer_that_is_closed_while_a_follower_is_behind_ends_at_once(
    shard: FollowedShard, make: Callable[..., Consumer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nearest_module, "BEHIND_PAUSE_MS", 60_000)
    for follower in shard.followers.values():
        follower.lags.set()
    shard.put(*bodies(0, 3))
    consumer = make(start={0: 3})
    until(lambda: shard.fetches[1] + shard.fetches[2] > 0, pause)
    consumer.close()
    assert shard.fetches[0] == 0


def test_an_async_consumer_reads_from_followers(shard: FollowedShard) -> None:
    shard.put(*bodies(0, 3))
    wait_for_followers(shard, 3)

    async def consume() -> list[bytes]:
        async with AsyncConsumer(
            shard.cluster, "t", start="earliest", read_from="nearest"
        ) as consumer:
            found: list[bytes] = []
            while len(found) < 3:
                found += [message.body for message in await consumer.poll(100, 10)]
            return found

    assert asyncio.run(consume()) == bodies(0, 3)
    assert shard.fetches[0] == 0


@pytest.mark.parametrize("value", ["afar", None, 1])
def test_another_value_of_read_from_is_refused_with_the_choices(value: Any) -> None:
    with pytest.raises(Rejected) as refused:
        ConsumerConfig(read_from=value).check_values()
    assert (refused.value.field, refused.value.limit) == ("read_from", "leader, nearest")


@pytest.mark.parametrize("value", [-1, "3", True, 1.0])
def test_an_epoch_that_is_none_is_refused_with_its_limit(value: object) -> None:
    with pytest.raises(Rejected) as refused:
        fetch_request("t", {0: 0}, 1, 1, 0, value, wait_limit_ms=0)
    assert refused.value.field == "seen_epoch"
    assert refused.value.limit == f"0..{NUMBER_MAX}"


def test_the_replicas_on_this_machine_are_known_by_their_addresses() -> None:
    for endpoint in ("127.0.0.1:5", "tls://127.0.0.1:5", "[::1]:5", "localhost:5"):
        assert is_local(endpoint), endpoint
    # An address that is reserved for documentation, a name that is never resolved, an actor's name, none.
    for endpoint in ("192.0.2.1:5", "nowhere.invalid:5", actor_name("c", 0, 1, "commit_log"), ""):
        assert not is_local(endpoint), endpoint


@pytest.mark.parametrize(
    ("local", "expected"),
    [({1}, 1), ({2}, 2), ({0}, None), ({0, 2}, 2), ({1, 2}, {1, 2}), (set(), {1, 2})],
)
def test_a_follower_on_this_machine_comes_first_then_the_leader_if_it_is_here(
    monkeypatch: pytest.MonkeyPatch, local: set[int], expected: Any
) -> None:
    endpoints = {number: f"replica-{number}" for number in range(3)}
    routes = Routes({0: endpoints[0]}, "", replicas=3, replica_endpoints={0: endpoints})
    monkeypatch.setattr(nearest_module, "is_local", lambda each: int(each[-1]) in local)
    found = NearestReplicas(routes, 0).nearest()
    if isinstance(expected, set):
        assert found is not None
        assert found.id in expected
    else:
        assert (None if found is None else found.id) == expected
