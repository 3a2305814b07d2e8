"""Calls that no client of ours makes, over the wire to a real shard: refused with field and limit, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pyarrow as pa
import pytest

from raymq.actors.api.fetches import pack_request, unpack_slice
from raymq.actors.api.leases import packed_offsets
from raymq.actors.api.transactions import pack_rows
from raymq.actors.protocol.flight_messages import FETCH_SCHEMA
from raymq.actors.server.ray.ray_methods import RayMethods
from raymq.client.transport.flight_client import ShardConnection
from raymq.store.base.errors import OffsetOutOfRange, Rejected
from raymq.store.groups.leases.requests import offsets_of
from raymq.store.records.requests import FetchRequest, MessageSelector
from tests.support.batches import batch
from tests.support.served_shard import CLUSTER_ID, TOKEN, ServedShard

HUGE = 2**70
#: of the kinds that JSON has, what is neither a count nor a name
WRONG = [HUGE, -5, 1.5, "1", True, None, [1], {"a": 1}, float("nan")]
NO_NAMES = [HUGE, -5, 1.5, "", "no such topic", "../t", True, None, ["t"], {"a": 1}, "x" * 100_000]


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedShard]:
    """A shard with topic t of two queues. Queue 0 has three messages."""
    with ServedShard(tmp_path_factory.mktemp("raw") / "store") as shard:
        shard.start_flusher()
        shard.cluster.create_topic("t", queues=2)
        shard.cluster.create_topic("compacted", queues=1, compacted=True)
        with shard.cluster.producer() as producer:
            for _ in range(3):
                producer.send("t", b"x", queue_id=0)
        yield shard


@pytest.fixture(scope="module")
def connection(shard: ServedShard) -> Iterator[ShardConnection]:
    with closing(ShardConnection(shard.endpoints[0], TOKEN, CLUSTER_ID, 0)) as connection:
        yield connection


def calls() -> Iterator[tuple[str, dict[str, Any], str]]:
    """(operation, arguments, the field that is wrong)."""
    topic = {"name": "new", "queues": 1, "shards": [0]}
    for name in NO_NAMES[:-1]:
        if name != "no such topic":
            yield "create_topic", {**topic, "name": name}, "topic"
        for op, more in (
            ("queue_ranges", {}),
            ("offsets_by_time", {"times": {"0": 0}, "boundary": "first"}),
            ("find_messages", {each: FIND[each] for each in FIND if each != "topic"}),
            ("offsets", {"group": "g"}),
            ("commit_offsets", {"group": "g", "offsets": {"0": 0}}),
            ("send_back", {"group": "g", "queue_id": 0, "offset": 0, "delay_level": 0}),
            ("lock_queues", {each: LOCK[each] for each in LOCK if each != "topic"}),
            ("prepare_half", {each: HALF[each] for each in HALF if each != "topic"}),
        ):
            yield op, {**more, "topic": name}, "topic"

    grown = {"name": "t", "queues": 5, "shards": [0], "are_hidden": True}
    for wrong in WRONG:
        yield "add_queues", {**grown, "queues": wrong}, "queues"
        yield "add_queues", {**grown, "shards": [wrong]}, "shards"
        if wrong != [1]:
            yield "known_producers", {"producer_ids": wrong}, "producer_ids"
        yield "known_producers", {"producer_ids": [wrong]}, "producer_ids"
        yield "create_topic", {**topic, "queues": wrong}, "queues"
        yield "create_topic", {**topic, "shards": [wrong]}, "shards"
        if wrong is not None:
            yield "create_topic", {**topic, "attributes": wrong}, "attributes"
        yield "create_topic", {**topic, "attributes": {"cleanup.policy": wrong}}, "attributes"
        yield "init_producer", {"producer_id": wrong}, "producer_id"
        fence = {"producer_id": 1, "epoch": 1, "topic": "t"}
        yield "fence_producer", {**fence, "producer_id": wrong}, "producer_id"
        yield "fence_producer", {**fence, "epoch": wrong}, "epoch"
        yield "fence_producer", {**fence, "topic": wrong}, "topic"
        if wrong != "1":
            yield "commit_offsets", {"group": wrong, "topic": "t", "offsets": {"0": 0}}, "group"
            yield "offsets", {"group": wrong, "topic": "t"}, "group"
        back = {"group": "g", "topic": "t", "queue_id": 0, "offset": 0, "delay_level": 0}
        yield "send_back", {**back, "queue_id": wrong}, "queue_id"
        yield "send_back", {**back, "offset": wrong}, "offset"
        if wrong is not None:
            yield "send_back", {**back, "max_reconsume_times": wrong}, "max_reconsume_times"
            yield "put_retry", {**RETRY, "max_reconsume_times": wrong}, "max_reconsume_times"
        yield "put_retry", {**RETRY, "reconsume_times": wrong}, "reconsume_times"
        yield "put_retry", {**RETRY, "born_time_ms": wrong}, "born_time_ms"
        if wrong != {"a": 1}:
            yield "put_retry", {**RETRY, "properties": wrong}, "properties"
        if wrong != -5:
            yield "send_back", {**back, "delay_level": wrong}, "delay_level"
        commit = {"group": "g", "topic": "t"}
        yield "commit_offsets", {**commit, "offsets": {"0": wrong}}, "offsets"
        if not isinstance(wrong, dict):
            yield "commit_offsets", {**commit, "offsets": wrong}, "offsets"
        if wrong != "1":
            yield "commit_offsets", {**commit, "offsets": {str(wrong): 0}}, "offsets"

        yield from calls_of_a_shard(wrong)
        yield from queries(wrong)
        yield from dead(wrong)
        yield from locks(wrong)
        yield from transactions(wrong)
        yield from commits(wrong)
        yield from calls_between_replicas(wrong)

    for shards in ([], [1], [0] * 300_000, list(range(300_000)), [-1], "0", 0, None):
        yield "create_topic", {**topic, "shards": shards}, "shards"
    many = {str(queue): 0 for queue in range(300_000)}
    yield "commit_offsets", {"group": "g", "topic": "t", "offsets": many}, "offsets"
    yield "init_producer", {"producer_id": 2**64}, "producer_id"
    yield "known_producers", {"producer_ids": [0] * 300_000}, "producer_ids"


RETRY = {
    "group": "g",
    "body": "",
    "properties": {"K": "v"},
    "born_time_ms": 1,
    "reconsume_times": 1,
}
FIND = {
    "topic": "t",
    "key": "k",
    "is_unique": False,
    "begin_ms": 0,
    "end_ms": 1,
    "max_records": 64,
}


HALF = {
    "topic": "t",
    "queue_id": 0,
    "group": "g",
    "body": "",
    "properties": {},
    "born_time_ms": 0,
}


LOCK = {"group": "g", "topic": "t", "client": "c", "queues": [0]}


def locks(wrong: Any) -> Iterator[tuple[str, dict[str, Any], str]]:
    """As `calls`: of those of servers for RocketMQ's clients."""
    word = {"protocol": "p", "server": "s", "groups": {"g": ["c"]}}
    commit = {"group": "g", "topic": "t", "offsets": {"0": 0}}
    if wrong != [1]:
        yield "lock_queues", {**LOCK, "queues": wrong}, "queues"
    for op in ("lock_queues", "unlock_queues"):
        yield op, {**LOCK, "queues": [wrong]}, "queues"
        if wrong != "1":
            yield op, {**LOCK, "client": wrong}, "client"
            yield op, {**LOCK, "group": wrong}, "group"
    yield "lock_queues", {**LOCK, "queues": [2]}, "queue_id"
    yield "lock_queues", {**LOCK, "client": "x" * 300}, "client"
    if wrong is not None:
        yield "lock_queues", {**LOCK, "number": wrong}, "number"
        yield "commit_offsets", {**commit, "clients": wrong}, "clients"
    if wrong != "1":
        if wrong is not None:
            yield "commit_offsets", {**commit, "clients": {"0": wrong}}, "clients"
        yield "commit_offsets", {**commit, "clients": {str(wrong): "c"}}, "clients"
        yield "note_foreign_members", {**word, "protocol": wrong}, "protocol"
        yield "note_foreign_members", {**word, "server": wrong}, "server"
        yield "note_foreign_members", {**word, "groups": {"g": [wrong]}}, "groups"
    yield "note_foreign_members", {**word, "groups": wrong}, "groups"
    client = ["c", "10.0.0.1:5", "JAVA", "5.3.3", 0]
    if type(wrong) is not str:
        for place in range(4):
            bad = [*client[:place], wrong, *client[place + 1 :]]
            yield "note_foreign_members", {**word, "groups": {"g": [bad]}}, "groups"
    yield "note_foreign_members", {**word, "groups": {"g": [["", *client[1:]]]}}, "groups"
    yield "note_foreign_members", {**word, "groups": {"g": [client[:4]]}}, "groups"
    yield "note_foreign_members", {**word, "groups": {"g": [[*client[:4], -1]]}}, "groups"
    yield "note_foreign_members", {**word, "groups": {"g": [["c" * 256, *client[1:]]]}}, "groups"
    yield "note_foreign_members", {**word, "groups": {"g": [client] * 1_001}}, "groups"
    yield "note_foreign_members", {**word, "groups": {"no group!": [client]}}, "group"
    reset = {"group": "g", "number": 1, "offsets": {"t": {"0": 1}}}
    yield "notify_reset", {**reset, "offsets": wrong}, "offsets"
    yield "notify_reset", {**reset, "offsets": {"t": wrong}}, "offsets"
    yield "notify_reset", {**reset, "number": 0}, "number"
    if wrong != "1":
        yield "notify_reset", {**reset, "group": wrong}, "group"
        yield "queue_locks", {"group": wrong, "topic": "t"}, "group"
        yield "queue_locks", {"group": "g", "topic": wrong}, "topic"


def transactions(wrong: Any) -> Iterator[tuple[str, dict[str, Any], str]]:
    """As `calls`: of those on half messages."""
    ended = {"offset": 0, "group": "g", "decision": "commit"}
    asked = {"groups": ["g"], "max_records": 1}
    for number in ("queue_id", "born_time_ms"):
        yield "prepare_half", {**HALF, number: wrong}, number
    for text in ("body", "properties"):
        yield "prepare_half", {**HALF, text: wrong}, text
    yield "end_half", {**ended, "offset": wrong}, "offset"
    yield "end_half", {**ended, "decision": wrong}, "decision"
    yield "halves_to_check", {**asked, "groups": wrong if wrong != [1] else []}, "groups"
    yield "halves_to_check", {**asked, "max_records": wrong}, "max_records"

    if wrong != "1":
        yield "prepare_half", {**HALF, "group": wrong}, "group"
        yield "end_half", {**ended, "group": wrong}, "group"
        yield "halves_to_check", {**asked, "groups": [wrong]}, "groups"
    if wrong is not None:
        yield "prepare_half", {**HALF, "sys_flag": wrong}, "sys_flag"
        yield "prepare_half", {**HALF, "born_host": wrong}, "born_host"
        yield "end_half", {**ended, "physical_offset": wrong}, "physical_offset"
    if wrong is not None and wrong != -5:
        yield "prepare_half", {**HALF, "flag": wrong}, "flag"
    for properties in ({"a\x01": "b"}, {"a": "b\x02"}, {"": "b"}):
        yield "prepare_half", {**HALF, "properties": properties}, "properties"
    yield "prepare_half", {**HALF, "sys_flag": 4}, "sys_flag"
    yield "prepare_half", {**HALF, "queue_id": 2}, "queue_id"
    for group in ("", "no group!", "g" * 300):
        yield "prepare_half", {**HALF, "group": group}, "group"
        yield "halves_to_check", {**asked, "groups": ["g", group]}, "group"
    yield "halves_to_check", {**asked, "groups": ["g"] * 1001}, "groups"
    yield "halves_to_check", {**asked, "max_records": 257}, "max_records"


SESSION = "0a" * 16
OFFSET = packed_offsets(offsets_of([0]))


def commits(wrong: Any) -> Iterator[tuple[str, dict[str, Any], str]]:
    """As `calls`: of those on transactions of one shard."""
    metadata, columns = pack_rows(batch([b"x"])) or ()
    rows = [metadata, columns]
    commit = {"session": SESSION, "number": 1, "parts": [["t", 0, 1]], "rows": rows}
    for op, arguments in (
        ("commit_transaction", commit),
        ("abort_transaction", {"session": SESSION, "number": 1}),
    ):
        yield op, {**arguments, "session": wrong}, "session"
        yield op, {**arguments, "number": wrong}, "number"

    yield "commit_transaction", {**commit, "parts": wrong}, "parts"
    yield "commit_transaction", {**commit, "parts": [wrong]}, "parts"
    yield "commit_transaction", {**commit, "rows": wrong}, "rows"
    yield "commit_transaction", {**commit, "rows": [wrong, columns]}, "rows"
    yield "commit_transaction", {**commit, "rows": [metadata, wrong]}, "rows"
    if wrong is None:
        yield "commit_transaction", {**commit, "rows": [metadata, "A" * (33 << 20)]}, "rows"
    for place in range(1, 3):
        part = ["t", 0, 1]
        part[place] = wrong
        yield "commit_transaction", {**commit, "parts": [part]}, "parts"
    for parts, field in (
        ([["t", 0, 2]], "rows"),
        ([["t", 2, 1]], "queue_id"),
        ([["no such topic", 0, 1]], "topic"),
        ([["t", 0, 1], ["t", 0, 1]], "parts"),
        ([["t", 0, 100_000], ["t", 1, 1]], "parts"),
        ([["rmq_sys_wheel_timer", 1, 1]], "queue_id"),
        ([["RMQ_SYS_TRANS_HALF_TOPIC", 0, 1]], "topic"),
    ):
        yield "commit_transaction", {**commit, "parts": parts}, field
    yield "commit_transaction", {"session": SESSION, "number": 1, "parts": []}, "parts"

    empty = {"session": SESSION, "number": 1, "parts": []}
    offsets = {"group": "g", "topic": "t", "offsets": {"0": 0}, "numbers": {"0": 1}, "seeks": []}
    acks = {"group": "g", "session": SESSION, "items": [[1, "t", 0, "ack", None, OFFSET]]}
    for name, value in (("offsets", offsets), ("acks", acks)):
        if wrong is not None:
            yield "commit_transaction", {**empty, name: wrong}, name
        yield "commit_transaction", {**empty, name: [wrong]}, name
        yield "commit_transaction", {**empty, name: [value, value]}, name
        if wrong != "1":
            yield "commit_transaction", {**empty, name: [{**value, "group": wrong}]}, "group"
    yield (
        "commit_transaction",
        {**empty, "offsets": [{**offsets, "offsets": {"0": wrong}}]},
        "offsets",
    )
    yield (
        "commit_transaction",
        {**empty, "offsets": [{**offsets, "numbers": {"0": wrong}}]},
        "numbers",
    )
    if wrong != [1]:
        yield "commit_transaction", {**empty, "offsets": [{**offsets, "seeks": wrong}]}, "offsets"
    yield "commit_transaction", {**empty, "acks": [{**acks, "session": wrong}]}, "session"
    nack = [[1, "t", 0, "nack", None, OFFSET]]
    yield "commit_transaction", {**empty, "acks": [{**acks, "items": nack}]}, "acks"
    if wrong != [1]:
        yield "commit_transaction", {**empty, "acks": [{**acks, "items": wrong}]}, "acks"


def dead(wrong: Any) -> Iterator[tuple[str, dict[str, Any], str]]:
    """As `calls`: of those on dead letters, and of pauses."""
    asked = {"group": "g", "begin": {}, "max_records": 1, "with_records": True}
    back = {"group": "g", "session": "5e" * 16, "settle": 1, "offsets": {"0": wrong}}
    yield "dead_letters", {**asked, "max_records": wrong}, "max_records"
    yield "dead_letters", {**asked, "max_records": 1_001}, "max_records"
    yield "dead_letters", {**asked, "begin": wrong}, "begin"
    yield "dead_letters", {**asked, "begin": {"0": wrong}}, "begin"
    yield "redrive", back, "offsets"
    yield "redrive", {**back, "offsets": wrong}, "offsets"
    if wrong is not True:
        yield "dead_letters", {**asked, "with_records": wrong}, "with_records"
        yield "pause_leases", {"group": "g", "paused": wrong}, "paused"
    if wrong != "1":
        yield "pause_leases", {"group": wrong, "paused": True}, "group"
        yield "dead_letters", {**asked, "group": wrong}, "group"
        if wrong is not None:
            yield "dead_letter_counts", {"group": wrong}, "group"


def queries(wrong: Any) -> Iterator[tuple[str, dict[str, Any], str]]:
    """As `calls`: of those that look for messages."""
    at = {"topic": "t", "times": {"0": 1}, "boundary": "first"}
    yield "offsets_by_time", {**at, "times": {"0": wrong}}, "times"
    yield "offsets_by_time", {**at, "boundary": wrong}, "boundary"
    if not isinstance(wrong, dict):
        yield "offsets_by_time", {**at, "times": wrong}, "times"
    if wrong != "1":
        yield "offsets_by_time", {**at, "times": {str(wrong): 0}}, "times"

    for number in ("begin_ms", "end_ms", "max_records"):
        yield "find_messages", {**FIND, number: wrong}, number
    yield "find_messages", {**FIND, "max_records": 65}, "max_records"
    if wrong != "1":
        yield "find_messages", {**FIND, "key": wrong}, "key"
    if wrong is not True:
        yield "find_messages", {**FIND, "is_unique": wrong}, "is_unique"
    yield "place_of_message", {"message_id": wrong}, "message_id"
    yield "cancel_timer", {"offset": wrong}, "offset"
    yield "cancel_timer", {"offset": 10**9}, "offset"


def calls_of_a_shard(wrong: Any) -> Iterator[tuple[str, dict[str, Any], str]]:
    """As `calls`: of operators, and of staged writes."""
    yield "move_leader", {"replica": wrong}, "replica"
    yield "note_shards", {"known": wrong, "joined": 1}, "known"
    yield "note_shards", {"known": 1, "joined": wrong}, "joined"
    change = {"values": {"flush_interval_ms": 1}, "by": "ann@here"}
    yield "set_config", {**change, "values": wrong}, "values"
    yield "set_config", {**change, "values": {"flush_interval_ms": wrong}}, "flush_interval_ms"
    if wrong != "1":
        yield "set_config", {**change, "by": wrong}, "by"
    of_facts = "at_ms" if isinstance(wrong, dict) else "facts"
    yield "note_unclean_recovery", {"facts": wrong}, of_facts
    yield "note_unclean_recovery", {"facts": {"at_ms": wrong}}, "at_ms"
    if wrong is not True:
        grown = {"name": "t", "queues": 5, "shards": [0], "are_hidden": wrong}
        yield "add_queues", grown, "are_hidden"
        topic = {"name": "new", "queues": 1, "shards": [0], "on_all": wrong}
        yield "create_topic", topic, "on_all"
    if wrong != "1":
        yield "set_schema", {"name": "t", "schema": wrong}, "schema"
    decision = {"write_id": "w", "staged_ms": 1}
    yield "decide_write", {"decision": {**decision, "staged_ms": wrong}}, "staged_ms"
    if wrong is not None:
        yield "decide_write", {"decision": decision, "complete": wrong}, "complete"
    rows = {"write_id": "w", "topic": "t", "queue_id": 0, "ranges": []}
    yield "publish_rows", {**rows, "queue_id": wrong}, "queue_id"
    yield "publish_rows", {**rows, "ranges": [wrong]}, "ranges"


def calls_between_replicas(wrong: Any) -> Iterator[tuple[str, dict[str, Any], str]]:
    """As `calls`: of the operations that any replica answers."""
    place = {"topic": "t", "queue_id": 0, "offset": 0}
    yield "check_record", {**place, "queue_id": wrong}, "queue_id"
    yield "check_record", {**place, "offset": wrong}, "offset"
    yield "log_units", {"start": wrong, "stop": 1}, "start"
    yield "log_units", {"start": 0, "stop": wrong}, "stop"
    yield "log_match", {"candidates": wrong}, "candidates"
    yield "log_match", {"candidates": [wrong]}, "candidates"
    yield "log_match", {"candidates": [[wrong, 0]]}, "candidates"
    yield "log_match", {"candidates": [[0, wrong]]}, "candidates"
    message = {"frame": "00", "replica": 0, "endpoints": {}}
    yield "elect", {**message, "frame": wrong}, "frame"
    yield "elect", {**message, "replica": wrong}, "replica"
    yield "elect", {**message, "endpoints": wrong}, "endpoints"
    if wrong != "1":
        yield "elect", {**message, "endpoints": {"1": wrong}}, "endpoints"
        yield "elect", {**message, "endpoints": {str(wrong): "a:1"}}, "endpoints"


@pytest.mark.parametrize(
    ("op", "arguments", "field"),
    [
        ("log_match", {}, "candidates"),
        ("create_topic", {"queues": 1, "shards": [0]}, "topic"),
        ("offsets", {"group": "g", "topic": "t", "queue": 1}, "args"),
        ("status", {"verbose": True}, "args"),
        ("status", [1], "args"),
        ("no_such_operation", {}, "op"),
    ],
)
def test_an_operation_with_a_missing_or_unknown_argument_says_which_it_takes(
    connection: ShardConnection, op: str, arguments: Any, field: str
) -> None:
    with pytest.raises(Rejected) as refused:
        connection.call(op, arguments)
    error = refused.value
    assert error.fields["field"] == field
    assert error.limit is not None
    assert error.fields["found"]


def test_an_operation_with_a_wrong_argument_is_refused_by_its_name(
    shard: ServedShard, connection: ShardConnection
) -> None:
    end = shard.host.store.log.end
    for op, arguments, field in calls():
        with pytest.raises(Rejected) as refused:
            connection.call(op, arguments)
        error = refused.value
        assert error.fields.get("field") == field, (op, str(arguments)[:200], error.message)
        assert error.limit is not None
        assert "found" in error.fields, (op, error.message)
        assert len(error.message) < 1000
    assert shard.host.store.log.end == end
    assert shard.host.serving.stop_error is None


def test_a_group_commits_only_offsets_that_its_queue_has(
    shard: ServedShard, connection: ShardConnection
) -> None:
    commit = {"group": "g", "topic": "t"}
    for offset in (4, 2**62):
        with pytest.raises(OffsetOutOfRange) as refused:
            connection.call("commit_offsets", {**commit, "offsets": {"1": 0, "0": offset}})
        assert (refused.value.min, refused.value.max, refused.value.queue_id) == (0, 3, 0)
    assert connection.call("offsets", commit) == {}
    connection.call("commit_offsets", {**commit, "offsets": {"0": 3, "1": 0}})
    assert connection.call("offsets", commit) == {"0": 3, "1": 0}
    with shard.cluster.consumer("t", group="g2", start="earliest") as consumer:
        with pytest.raises(OffsetOutOfRange):
            consumer.commit({0: 4})
        assert consumer.committed() == {}


def fetches() -> Iterator[tuple[dict[str, Any], str]]:
    good = {"topic": "t", "offsets": {0: 0}, "max_bytes": 1000, "max_records": 10, "wait_ms": 0}
    for name in NO_NAMES:
        yield {**good, "topic": name}, "topic"

    for wrong in WRONG:
        if wrong != HUGE:
            yield {**good, "max_bytes": wrong}, "max_bytes"
            yield {**good, "max_records": wrong}, "max_records"
            yield {**good, "wait_ms": wrong}, "wait_ms"
        if wrong not in (HUGE, -5):
            # Of these the queue says that it does not hold them.
            yield {**good, "offsets": {0: wrong}}, "offsets"
        if wrong != "1" and not isinstance(wrong, dict | list):
            yield {**good, "offsets": {wrong: 0}}, "offsets"

    for wanted in (
        "TAG",
        ["TAG"],
        ["TAG", 1],
        ["TAG", "a", "b"],
        {"TAG": "a"},
        ["SQL92", "a" * 5000],
    ):
        yield {**good, "wanted": wanted}, "wanted"
    for wanted in (["REGEX", "a"], ["TAG", "||"]):
        yield {**good, "wanted": wanted}, "filter"
    yield {**good, "offsets": {}}, "offsets"
    yield {**good, "offsets": dict.fromkeys(range(300_000), 0)}, "offsets"
    yield {**good, "offsets": {2: 0}}, "offsets"


def test_a_fetch_with_a_wrong_argument_is_refused_by_its_name(
    shard: ServedShard, connection: ShardConnection
) -> None:
    stream = connection.fetch_stream()
    methods = RayMethods(shard.host)

    for arguments, field in fetches():
        for fetch in (
            lambda **given: stream.fetch(FetchRequest(**given)),
            lambda **given: methods.read(CLUSTER_ID, given),
        ):
            with pytest.raises(Rejected) as refused:
                fetch(**arguments)
            error = refused.value
            assert error.fields.get("field") == field, (str(arguments)[:200], error.message)
            assert len(error.message) < 1000

    most = {"max_bytes": HUGE, "max_records": HUGE, "wait_ms": 0}
    (found,) = stream.fetch(FetchRequest("t", {0: 0}, **most))
    assert found.next_offset == 3
    for offset in (HUGE, -5, 4):
        (found,) = stream.fetch(FetchRequest("t", {0: offset}, **most))
        assert isinstance(found.error, OffsetOutOfRange)
    stream.close()


def test_a_fetch_with_a_filter_says_how_far_the_shard_looked_whatever_carries_it(
    shard: ServedShard, connection: ShardConnection
) -> None:
    most = {"max_bytes": HUGE, "max_records": HUGE, "wait_ms": 0}
    wanted = MessageSelector("TAG", "no message has it")
    request = FetchRequest("t", {0: 1}, **most, wanted=wanted)
    with closing(connection.fetch_stream()) as stream:
        (over_flight,) = stream.fetch(request)
    (head, data), *rest = RayMethods(shard.host).read(CLUSTER_ID, pack_request(request))
    over_ray = unpack_slice(head, pa.ipc.read_record_batch(data, FETCH_SCHEMA).column(0))
    assert not rest
    for found in (over_flight, over_ray):
        assert (found.first_offset, found.next_offset, found.error) == (1, 3, None)
        assert len(found.records) == 0


def puts() -> Iterator[tuple[dict[str, Any], str]]:
    good = {"topic": "t", "queue": 1, "pid": 7, "epoch": 0, "seq": 0, "acks": "quorum"}
    for name in NO_NAMES:
        yield {**good, "topic": name}, "topic"
    for wrong in WRONG:
        yield {**good, "queue": wrong}, "queue"
        if wrong is not None:
            yield {**good, "pid": wrong}, "pid"
        yield {**good, "epoch": wrong}, "epoch"
        yield {**good, "seq": wrong}, "seq"
        yield {**good, "acks": wrong}, "acks"


#: what errors call the short keys of the wire
NAMED = {"queue": "queue_id", "pid": "producer_id", "seq": "first_sequence"}


def test_a_put_with_a_wrong_argument_is_refused_by_its_name_and_stores_nothing(
    shard: ServedShard, connection: ShardConnection
) -> None:
    end = shard.host.store.log.end
    stream = connection.put_stream()
    for number, (meta, field) in enumerate(puts(), start=1):
        stream.send({**meta, "id": number, "read": number - 1}, batch([b"x"]))
        (ack,) = stream.receive()
        assert ack["id"] == number
        assert ack["error"]["kind"] == "Rejected", (str(meta)[:200], ack)
        assert ack["error"]["fields"]["field"] == NAMED.get(field, field), (str(meta)[:200], ack)
    stream.close()
    assert shard.host.store.log.end == end
    assert shard.host.serving.stop_error is None


def test_metadata_that_is_nested_without_end_is_refused(connection: ShardConnection) -> None:
    deep: Any = "x"
    for _ in range(900):
        deep = [deep]
    with pytest.raises(Rejected):
        connection.call("queue_ranges", {"topic": deep})
    raw = b'{"args":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    import pyarrow.flight as flight

    options = flight.FlightCallOptions(headers=connection._headers)
    (answer,) = connection._client.do_action(flight.Action("describe", raw), options=options)
    assert b"Rejected" in answer.body.to_pybytes()
