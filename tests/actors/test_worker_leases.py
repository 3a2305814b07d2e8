"""Leases of messages through the leader of a shard: requests that wait, their answers, settlements, options."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from raymq.actors.api import leases
from raymq.actors.api.leases import LeaseCall, LeasedMessages
from raymq.client.messages.message import queue_offsets
from raymq.store.base.errors import Rejected
from raymq.store.groups.leases.entries import SettleOutcome
from raymq.store.groups.leases.options import LeaseOptions
from raymq.store.groups.leases.requests import SettleItem, offsets_of
from raymq.store.records.requests import MessageSelector
from raymq.store.state.topics import dlq_topic
from tests.actors.test_commit_log_host import Shard
from tests.actors.test_group_service import GROUP, QUEUES, TOPIC, committed, put_messages, reopen
from tests.support.batches import put_one, request
from tests.support.roles import leader_of
from tests.support.waiting import until

KEY = (TOPIC, 0)


class Worker:
    """A session that makes single requests."""

    def __init__(self, shard: Shard | None, *topics: str, **options: Any) -> None:
        """Args: `shard`: None: it asks none."""
        self._shard = shard
        self.session = secrets.token_bytes(16)
        self.topics = topics or (TOPIC,)
        self.selector = options.pop("selector", None)
        self.options = LeaseOptions(**options)
        self.requests = self.settles = 0

    @property
    def shard(self) -> Shard:
        assert self._shard is not None
        return self._shard

    def call(self, count: int, **changes: Any) -> LeaseCall:
        made = LeaseCall(
            *(GROUP, self.topics, self.session, self.requests, count, 4 << 20, 0, "earliest"),
            self.options,
            self.selector,
        )
        return made._replace(**changes)

    def lease(self, count: int, *, again: bool = False, **changes: Any) -> LeasedMessages:
        if not again:
            self.requests += 1
        return self.shard.host.lease(self.call(count, **changes), lambda: False)

    def offsets(self, count: int, **changes: Any) -> list[tuple[int, int]]:
        """Queue and offset of each message."""
        found = self.lease(count, **changes)
        assert sum(len(each.offsets) for each in found.queues) == len(found.records or ())
        return [(each.key[1], offset) for each in found.queues for offset in each.offsets.tolist()]

    def settle(
        self,
        number: int,
        offsets: list[int],
        verdict: SettleOutcome = SettleOutcome.ACKED,
        *,
        delay_ms: int | None = None,
        again: bool = False,
    ) -> list[int]:
        """Returns: the refused offsets."""
        if not again:
            self.settles += 1
        item = SettleItem(number, KEY, offsets_of(offsets), verdict, delay_ms)
        answer = self.shard.host.call(
            "settle",
            {**self.names(), "settle": self.settles, "items": leases.pack_items([item])},
        )
        refused = leases.unpack_refused(answer["refused"])
        return [offset for each in refused for offset in each.offsets.tolist()]

    def names(self) -> dict[str, Any]:
        return {"group": GROUP, "session": self.session.hex()}


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


def put(shard: Shard, *bodies: bytes, queue: int = 0) -> None:
    put_one(shard.host, request(list(bodies), topic=TOPIC, queue=queue)).wait(10)
    await_dispatch(shard)


def await_dispatch(shard: Shard) -> None:
    leader_of(shard.host).await_dispatch()


def test_a_worker_gets_messages_of_all_queues_and_settles_them(shard: Shard):
    put_messages(shard.host, 3)
    await_dispatch(shard)
    worker = Worker(shard)
    found = worker.lease(100)
    assert found.number == 1
    assert found.lease_ms == 60_000
    got = {each.key: each.offsets.tolist() for each in found.queues}
    assert got == {(TOPIC, queue_id): [0, 1, 2] for queue_id in range(QUEUES)}
    assert all(each.attempts.tolist() == [1, 1, 1] for each in found.queues)
    assert isinstance(found.records, pa.Array)
    assert queue_offsets(found.records).tolist() == [0, 1, 2] * QUEUES

    assert worker.settle(1, [0, 1]) == []
    assert committed(shard.host)["0"] == 2
    assert worker.settle(1, [0, 2]) == [0]
    assert committed(shard.host)["0"] == 3
    assert worker.offsets(100) == []


def test_a_request_waits_for_a_message(shard: Shard):
    worker = Worker(shard)
    found: list[tuple[int, int]] = []
    waiting = threading.Thread(target=lambda: found.extend(worker.offsets(5, wait_ms=20_000)))
    waiting.start()
    time.sleep(0.2)
    put_one(shard.host, request([b"late"], topic=TOPIC, queue=2)).wait(10)
    waiting.join(10)
    assert found == [(2, 0)]


def test_a_request_waits_until_a_message_is_due_again(shard: Shard):
    put(shard, b"a")
    worker = Worker(shard)
    assert worker.offsets(1) == [(0, 0)]
    worker.settle(1, [0], SettleOutcome.NACKED, delay_ms=300)
    assert worker.offsets(1) == []
    began_s = time.monotonic()
    found = worker.lease(1, wait_ms=20_000)
    assert 0.2 < time.monotonic() - began_s < 10
    assert found.queues[0].attempts.tolist() == [2]


def test_what_another_worker_gives_back_comes_at_once(shard: Shard):
    put(shard, b"a")
    first, second = Worker(shard), Worker(shard)
    assert first.offsets(1) == [(0, 0)]
    found: list[LeasedMessages] = []
    waiting = threading.Thread(target=lambda: found.append(second.lease(1, wait_ms=20_000)))
    waiting.start()
    time.sleep(0.2)
    assert first.settle(1, [0], SettleOutcome.RETURNED) == []
    waiting.join(10)
    # It was not worked on.
    assert found[0].queues[0].attempts.tolist() == [1]


def test_a_worker_that_has_left_gets_nothing(shard: Shard):
    worker = Worker(shard)
    worker.requests += 1
    began_s = time.monotonic()
    found = shard.host.lease(worker.call(1, wait_ms=20_000), lambda: True)
    assert found == LeasedMessages(1)
    assert time.monotonic() - began_s < 5


def test_a_repeated_request_and_a_repeated_settlement_get_their_first_answers(shard: Shard):
    put(shard, b"a", b"b", b"c")
    worker = Worker(shard)
    assert worker.offsets(2) == [(0, 0), (0, 1)]
    assert worker.offsets(2, again=True) == [(0, 0), (0, 1)]
    assert worker.settle(1, [1, 2]) == [2]
    assert worker.settle(1, [1, 2], again=True) == [2]
    assert worker.offsets(2, again=True) == [(0, 0)]
    assert worker.offsets(2) == [(0, 2)]
    with pytest.raises(Rejected, match="the session has made a newer request than 1"):
        shard.host.lease(worker.call(2, request=1), lambda: False)


def test_leases_and_their_numbers_last_over_a_start(shard: Shard):
    put(shard, b"a", b"b", b"c")
    worker = Worker(shard)
    assert worker.offsets(2) == [(0, 0), (0, 1)]
    reopen(shard)
    await_dispatch(shard)
    assert worker.offsets(2, again=True) == [(0, 0), (0, 1)]
    assert worker.settle(1, [0, 1]) == []
    assert worker.offsets(2) == [(0, 2)]


def test_a_new_leader_begins_the_times_of_leases_with_its_own_beginning(shard: Shard):
    put(shard, b"a")
    options = {"lease_ms": 1_500, "backoff_ms": (0,)}
    assert Worker(shard, **options).offsets(1) == [(0, 0)]
    time.sleep(1.0)
    reopen(shard)
    await_dispatch(shard)
    began_s = time.monotonic()
    # The first request of this leadership comes when their times are over, and not when they begin.
    time.sleep(1.6)
    found = Worker(shard, **options).lease(1)
    assert [each.attempts.tolist() for each in found.queues] == [[2]]
    assert time.monotonic() - began_s >= 1.5


def test_leases_are_renewed_by_their_numbers(shard: Shard):
    put(shard, b"a", b"b")
    worker = Worker(shard)
    worker.offsets(1)
    worker.offsets(1)
    renewed = shard.host.call("extend_leases", {**worker.names(), "leases": [2, 7]})
    assert renewed == {"granted_ms": {"2": 60_000}}
    renewed = shard.host.call("extend_leases", worker.names())
    assert renewed == {"granted_ms": {"1": 60_000, "2": 60_000}}
    with pytest.raises(Rejected, match="leases"):
        shard.host.call("extend_leases", {**worker.names(), "leases": [0]})


def test_an_operator_takes_back_what_workers_hold(shard: Shard):
    put(shard, b"a", b"b")
    worker, other = Worker(shard), Worker(shard)
    assert worker.offsets(2) == [(0, 0), (0, 1)]
    found: list[tuple[int, int]] = []
    waiting = threading.Thread(target=lambda: found.extend(other.offsets(5, wait_ms=20_000)))
    waiting.start()
    time.sleep(0.2)
    asked = {"group": GROUP, "topic": TOPIC}
    assert shard.host.call("release_leases", asked) == {"released": 2}
    waiting.join(10)
    assert found == [(0, 0), (0, 1)]
    assert worker.settle(1, [0]) == [0]
    assert shard.host.call("release_leases", {"group": GROUP}) == {"released": 2}
    assert shard.host.call("release_leases", {"group": "unknown"}) == {"released": 0}


def test_a_request_that_waits_gets_nothing_after_its_session_has_ended(shard: Shard):
    worker, other = Worker(shard), Worker(shard)
    found: list[tuple[int, int]] = []
    waiting = threading.Thread(target=lambda: found.extend(worker.offsets(5, wait_ms=20_000)))
    waiting.start()
    time.sleep(0.2)
    # Its worker has closed, and the shard does not know yet that the connection has.
    worker.lease(0, again=True)
    put(shard, b"a")
    waiting.join(10)
    assert found == []
    assert other.offsets(5, wait_ms=20_000) == [(0, 0)]


def test_metrics_say_what_workers_have_and_what_became_of_it(shard: Shard):
    put(shard, b"a", b"b", b"c", b"d", b"e")
    worker = Worker(shard)
    worker.offsets(5)
    worker.settle(1, [0])
    worker.settle(1, [1], SettleOutcome.NACKED, delay_ms=50_000)
    worker.settle(1, [2], SettleOutcome.REJECTED)
    found = leader_of(shard.host).report.metrics()
    assert found["raymq_leased_messages"] == {(GROUP,): 2}
    assert found["raymq_undelivered_messages"] == {(GROUP,): 1}
    assert found["raymq_lease_outcomes_total"] == {
        (GROUP, "acked"): 1,
        (GROUP, "nacked"): 1,
        (GROUP, "dead"): 1,
    }
    assert found["raymq_uncopied_messages_total"] == 0
    assert found["raymq_highest_attempts"] == {(GROUP,): 1}
    assert found["raymq_paused_workers"] == {(GROUP,): 0}


def test_metrics_say_what_has_died_and_what_is_paused(shard: Shard):
    put(shard, b"a", b"b", b"c", b"d")
    worker = Worker(shard, dead_rate=1)
    worker.offsets(4)
    worker.settle(1, [0, 1, 2], SettleOutcome.REJECTED)
    await_dispatch(shard)
    report = leader_of(shard.host).report
    found = report.metrics()
    assert found["raymq_dead_letters"] == {(GROUP,): 3}
    assert found["raymq_paused_workers"] == {(GROUP,): 1}
    assert worker.lease(1).paused == "dead letters"

    back = {"group": GROUP, "session": "5e" * 16, "settle": 1}
    offsets = {"0": leases.packed_offsets(offsets_of([1]))}
    assert shard.host.call("redrive", {**back, "offsets": offsets})["topics"] == {TOPIC: 1}
    shard.host.call("pause_leases", {"group": GROUP, "paused": False})
    found = report.metrics()
    assert found["raymq_dead_letters"] == {(GROUP,): 2}
    assert found["raymq_paused_workers"] == {(GROUP,): 0}
    # The group that puts back is not shown, and not forgotten: what went back would be a dead letter again.
    leader_of(shard.host).claims.forget_unused(1 << 60)
    assert report.metrics()["raymq_dead_letters"] == {(GROUP,): 2}
    assert {each[-1] for each in found["raymq_consumer_lag_messages"]} == {GROUP}


def test_all_workers_of_a_group_have_the_same_options(shard: Shard):
    put(shard, b"a")
    first = Worker(shard)
    first.offsets(1)
    other = Worker(shard, lease_ms=5_000, order="queue")
    with pytest.raises(Rejected) as refusal:
        other.offsets(1)
    error = refusal.value
    assert error.limit == "lease_ms 60000, order ''"
    assert error.found == "lease_ms 5000, order 'queue'"
    with pytest.raises(Rejected, match="no filter, and this one has the filter TAG 'a'"):
        Worker(shard, selector=MessageSelector("TAG", "a")).offsets(1)

    # Its session ends.
    assert first.offsets(0) == []
    assert other.offsets(1) == []


def test_a_filter_settles_what_it_passes_over(shard: Shard):
    for tag in ("x", "y", "x", "y", "x"):
        put_one(shard.host, request([b"tagged"], topic=TOPIC, tag=tag)).wait(10)
    await_dispatch(shard)
    worker = Worker(shard, selector=MessageSelector("TAG", "y"))
    found = worker.lease(10)
    assert found.queues[0].offsets.tolist() == [1, 3]
    assert committed(shard.host)["0"] == 1
    worker.settle(found.number, [1, 3])
    assert committed(shard.host)["0"] == 5


def test_an_answer_has_only_so_many_bytes(shard: Shard):
    put(shard, *[b"x" * 1_000] * 10)
    worker = Worker(shard)
    assert worker.offsets(10, max_bytes=3_000) == [(0, 0), (0, 1)]
    worker.settle(1, [0, 1], SettleOutcome.NACKED, delay_ms=0)
    # How large those are that come again is not looked at before. What is too much is given back, and not counted.
    again = worker.lease(10, max_bytes=1_500)
    assert [each.offsets.tolist() for each in again.queues] == [[0, 1]]
    assert again.queues[0].attempts.tolist() == [2, 2]
    (rest,) = worker.lease(10).queues
    assert rest.offsets.tolist() == [2, 3, 4, 5, 6, 7, 8, 9]
    assert rest.attempts.tolist() == [1] * 8


def test_a_message_that_every_worker_refuses_becomes_a_dead_letter(shard: Shard):
    put(shard, b"poison")
    worker = Worker(shard, max_attempts=2)
    for attempt in (1, 2):
        found = worker.lease(1, wait_ms=10_000)
        assert found.queues[0].attempts.tolist() == [attempt]
        worker.settle(found.number, [0], SettleOutcome.NACKED, delay_ms=0)
    assert committed(shard.host)["0"] == 1
    ranges = shard.host.call("queue_ranges", {"topic": dlq_topic(GROUP)})
    until(
        lambda: shard.host.call("queue_ranges", {"topic": dlq_topic(GROUP)})["0"] == [0, 1],
        lambda: time.sleep(0.01),
    )
    assert list(ranges) == ["0"]


def test_leases_are_renewed_and_single_messages_get_more_time(shard: Shard):
    put(shard, b"a", b"b")
    worker = Worker(shard, lease_ms=1_000, backoff_ms=(0,))
    found = worker.lease(2)
    deadline_s = time.monotonic() + 2
    while time.monotonic() < deadline_s:
        answer = shard.host.call("extend_leases", worker.names())
        assert answer == {"granted_ms": {"1": 1_000}}
        time.sleep(0.2)
    message = [found.number, TOPIC, 0, 1]
    asked = {**worker.names(), "lease_ms": 5_000, "message": message}
    assert shard.host.call("extend_leases", asked) == {"granted_ms": {"1": 5_000}}

    other = Worker(shard, lease_ms=1_000, backoff_ms=(0,))
    assert other.offsets(2, wait_ms=5_000) == [(0, 0)]
    assert worker.settle(1, [0, 1]) == [0]
    with pytest.raises(Rejected, match="give lease_ms"):
        shard.host.call("extend_leases", {**worker.names(), "message": message})


def test_unknown_and_compacted_topics_have_no_workers(shard: Shard):
    with pytest.raises(Rejected, match="topic 'nothing' does not exist"):
        Worker(shard, "nothing").offsets(1)
    shard.host.call(
        "create_topic",
        {
            "name": "latest",
            "queues": 1,
            "shards": [0],
            "attributes": {"cleanup.policy": "COMPACTION"},
        },
    )
    with pytest.raises(Rejected, match="topic latest is compacted"):
        Worker(shard, "latest").offsets(1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"session": "x"}, "32 hexadecimal digits"),
        ({"topics": "orders"}, "topics is"),
        ({"max_records": -1}, "max_records"),
        ({"max_records": 1 << 40}, "max_records"),
        ({"request": 0}, "request"),
        ({"start": "now"}, "earliest or latest"),
        ({"options": {}}, "give an object with lease_ms"),
        ({"wanted": ["TAG"]}, "wanted"),
        ({"group": "no group!"}, "group"),
    ],
)
def test_a_malformed_request_is_refused(change: dict[str, Any], message: str):
    worker = Worker(None)
    worker.requests = 1
    fields = {**leases.pack_call(worker.call(1)), **change}
    with pytest.raises(Rejected, match=message):
        leases.unpack_call(fields, wait_limit_ms=0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lease_ms", 10),
        ("lease_ms", 4_000_000),
        ("max_lease_ms", 10),
        ("max_in_flight", 0),
        ("max_attempts", 0),
        ("backoff_ms", []),
        ("backoff_ms", [-1]),
        ("order", "time"),
        ("has_dead_letters", 1),
    ],
)
def test_a_wrong_option_is_refused(name: str, value: object):
    worker = Worker(None)
    worker.requests = 1
    fields = leases.pack_call(worker.call(1))
    options = fields["options"]
    assert isinstance(options, dict)
    fields["options"] = {**options, name: value}
    with pytest.raises(Rejected, match=name):
        leases.unpack_call(fields, wait_limit_ms=0)


def test_a_call_and_its_answer_keep_their_values_on_their_way(shard: Shard):
    put(shard, b"a", b"b")
    worker = Worker(shard, selector=MessageSelector("SQL92", "a > 1"), max_attempts=None)
    worker.requests = 7
    call = worker.call(5, wait_ms=100)
    assert leases.unpack_call(leases.pack_call(call), wait_limit_ms=1_000) == call

    found = Worker(shard).lease(2)
    head, records = leases.pack_leased(found)
    again = leases.unpack_leased(head, records)
    assert (again.request, again.number, again.lease_ms) == (1, 1, 60_000)
    for mine, theirs in zip(found.queues, again.queues, strict=True):
        assert mine.key == theirs.key
        assert np.array_equal(mine.offsets, theirs.offsets)
        assert np.array_equal(mine.attempts, theirs.attempts)
    with pytest.raises(ValueError, match="with other records"):
        leases.unpack_leased(head, None)


@pytest.mark.parametrize(
    "items",
    [
        [],
        {},
        [[1, TOPIC, 0, "done", None, ""]],
        [[1, TOPIC, 0, "ack", None]],
        [[0, TOPIC, 0, "ack", None, leases.packed_offsets(offsets_of([1]))]],
        [[1, TOPIC, 0, "ack", -1, leases.packed_offsets(offsets_of([1]))]],
        [[1, TOPIC, 0, "ack", None, "no base64!"]],
        [[1, TOPIC, 0, "ack", None, leases.packed_offsets(offsets_of(range(70_000)))]],
    ],
)
def test_malformed_settlements_are_refused(items: object):
    with pytest.raises(Rejected):
        leases.check_items("items", items)
