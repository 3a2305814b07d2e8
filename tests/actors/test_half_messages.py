"""Half messages over a real store: prepared, ended and checked through the operations of a shard."""

from __future__ import annotations

import threading
from base64 import b64decode, b64encode
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from raymq.actors.leader import leader
from raymq.actors.server.ray.ray_methods import RayMethods
from raymq.store.base.errors import DeliveryUnknown, Rejected, TopicMissing, Unavailable
from raymq.store.base.format import HALF_TOPIC, parse_message_id
from raymq.store.queues.raw_records import decode_records
from raymq.store.records.producer_stamp import STAMP_NAME
from raymq.store.records.properties import decode
from raymq.store.records.requests import FetchRequest
from raymq.store.services import half_messages
from raymq.store.services.transaction import DISCARD_TOPIC
from tests.actors.test_commit_log_host import HASTY, Shard
from tests.support.roles import leader_of
from tests.support.waiting import until

GROUP, TOPIC = "payers", "orders"


@pytest.fixture
def shard(tmp_path) -> Iterator[Shard]:
    made = Shard(tmp_path / "store")
    made.open()
    made.start_flusher()
    made.host.call("create_topic", {"name": TOPIC, "queues": 2, "shards": [0]})
    yield made
    made.close()
    stop_flushers(made)


def stop_flushers(shard: Shard) -> None:
    for flusher in shard.flushers:
        flusher.kill()
        flusher.wait()
    shard.flushers.clear()


def reopen(shard: Shard) -> None:
    """Another leader has the log."""
    shard.close()
    stop_flushers(shard)
    shard.open()
    shard.start_flusher()


def prepare(shard: Shard, body: bytes = b"half", **properties: str) -> dict[str, Any]:
    arguments = {
        "topic": TOPIC,
        "queue_id": 1,
        "group": GROUP,
        "body": b64encode(body).decode(),
        "properties": properties,
        "born_time_ms": 1_700_000_000_000,
    }
    return shard.host.call("prepare_half", arguments)


def end(shard: Shard, offset: int, decision: str, **more: object) -> tuple[str, bool]:
    arguments = {"offset": offset, "group": GROUP, "decision": decision, **more}
    found = shard.host.call("end_half", arguments)
    return found["outcome"], found["is_repeated"]


def asked(shard: Shard, *groups: str) -> list[tuple[int, int]]:
    """Offset and number of checks of each half message that is handed out."""
    arguments = {"groups": list(groups) or [GROUP], "max_records": 10}
    halves = shard.host.call("halves_to_check", arguments)["halves"]
    return [(half["offset"], half["checks"]) for half in halves]


def seen(shard: Shard) -> list[bytes]:
    shard.host.dispatcher.await_confirmed()
    (part,) = shard.host.fetch(FetchRequest(TOPIC, {1: 0}, 1 << 20, 100, 0)) or [None]
    if part is None or part.records is None:
        return []
    return decode_records(part.records).column("body").to_pylist()


def count(shard: Shard, topic: str) -> int:
    """How many messages a topic of the engine has."""
    shard.host.dispatcher.await_confirmed()
    return shard.host.store.queue_range(topic, 0)[1]


def test_a_half_message_has_names_and_its_fields_and_is_seen_when_it_is_committed(
    shard: Shard,
) -> None:
    arguments = {
        "topic": TOPIC,
        "queue_id": 1,
        "group": GROUP,
        "body": b64encode(b"half").decode(),
        "properties": {"UNIQ_KEY": "u1", "TAGS": "paid", "colour": "rö\n"},
        "born_time_ms": 1_700_000_000_000,
        "flag": -7,
        "sys_flag": 1,
        "born_host": "[2001:db8::1]:5",
    }
    half = shard.host.call("prepare_half", arguments)
    assert (half["offset"], half["transaction_id"]) == (0, "u1")
    assert (half["topic"], half["queue_id"], half["is_repeated"]) == (TOPIC, 1, False)
    assert parse_message_id(half["message_id"])[1] == half["physical_offset"]
    assert seen(shard) == []

    found = shard.host.call("end_half", {"offset": 0, "group": GROUP, "decision": "commit"})
    assert found == {"outcome": "commit", "is_repeated": False, "topic": TOPIC, "queue_id": 1}
    shard.host.dispatcher.await_confirmed()
    (part,) = shard.host.fetch(FetchRequest(TOPIC, {1: 0}, 1 << 20, 100, 0))
    (row,) = decode_records(part.records).to_pylist()
    assert (row["body"], row["flag"], row["sys_flag"]) == (b"half", -7, 1 | 8 | 16)
    assert row["born_host"] == "[2001:db8:0:0:0:0:0:1]:5"
    assert row["prepared_transaction_offset"] == half["physical_offset"]
    properties = decode(row["properties"])
    assert (properties["TAGS"], properties["colour"]) == ("paid", "rö\n")
    assert (properties["UNIQ_KEY"], properties["PGROUP"]) == ("u1", GROUP)


def test_the_first_decision_counts_whichever_leader_is_asked(shard: Shard) -> None:
    offset = prepare(shard)["offset"]
    # The leader is lost between prepare and end.
    reopen(shard)
    assert end(shard, offset, "unknown") == ("open", False)
    assert end(shard, offset, "commit") == ("commit", False)
    for _ in range(2):
        assert end(shard, offset, "commit") == ("commit", True)
        assert end(shard, offset, "unknown") == ("commit", False)
        with pytest.raises(Rejected, match="resolved as COMMIT; it cannot become ROLLBACK"):
            end(shard, offset, "rollback")
        reopen(shard)
    assert seen(shard) == [b"half"]


def test_a_half_message_is_ended_by_its_group_and_at_its_place(shard: Shard) -> None:
    half = prepare(shard)
    with pytest.raises(Rejected, match="prepared by producer group 'payers', not 'others'"):
        end(shard, half["offset"], "commit", group="others")
    with pytest.raises(Rejected, match="another one is meant"):
        end(shard, half["offset"], "commit", physical_offset=half["physical_offset"] + 8)
    with pytest.raises(Rejected, match="half message 9 does not exist"):
        end(shard, 9, "commit")
    place = half["physical_offset"]
    assert end(shard, half["offset"], "rollback", physical_offset=place) == ("rollback", False)
    assert seen(shard) == []


def test_commits_of_many_threads_deliver_a_message_once(shard: Shard) -> None:
    halves = [prepare(shard, b"%d" % number)["offset"] for number in range(5)]
    answers: list[tuple[int, tuple[str, bool]]] = []

    def commit_all() -> None:
        for offset in halves:
            answers.append((offset, end(shard, offset, "commit")))

    threads = [threading.Thread(target=commit_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for offset in halves:
        found = [answer for each, answer in answers if each == offset]
        assert sorted(found) == [("commit", False)] + [("commit", True)] * 3
    assert sorted(seen(shard)) == [b"%d" % number for number in range(5)]


def test_a_question_is_unknown_then_asked_then_committed(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(half_messages, "CHECK_PAUSE_MS", 200)
    offset = prepare(shard, CHECK_IMMUNITY_TIME_IN_SECONDS="0", UNIQ_KEY="u1")["offset"]
    assert end(shard, offset, "unknown") == ("open", False)
    found = shard.host.call("halves_to_check", {"groups": ["x", GROUP], "max_records": 10})
    (half,) = found["halves"]
    assert (half["offset"], half["checks"]) == (offset, 1)
    assert 0 < found["next_ms"] <= 200
    (row,) = decode_records(pa.array([b64decode(half["record"])], pa.binary())).to_pylist()
    assert (row["topic"], row["queue_offset"], row["body"]) == (HALF_TOPIC, offset, b"half")
    assert decode(row["properties"])["UNIQ_KEY"] == "u1"

    assert asked(shard) == []
    assert asked(shard, "x") == []
    threading.Event().wait(0.25)
    assert asked(shard) == [(offset, 2)]
    assert end(shard, offset, "commit") == ("commit", False)
    threading.Event().wait(0.25)
    assert asked(shard) == []
    assert seen(shard) == [b"half"]


def test_a_half_message_is_given_up_after_its_last_check_whichever_leaders_counted(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(half_messages, "CHECK_PAUSE_MS", 20)
    offset = prepare(shard, CHECK_IMMUNITY_TIME_IN_SECONDS="0")["offset"]
    for checks in range(1, 16):
        assert asked(shard) == [(offset, checks)]
        if checks in (4, 15):
            reopen(shard)
            assert asked(shard) == []
        threading.Event().wait(0.05)
    assert asked(shard) == []
    assert count(shard, DISCARD_TOPIC) == 1
    with pytest.raises(Rejected, match="resolved as DISCARD"):
        end(shard, offset, "commit")
    assert seen(shard) == []


def test_a_request_that_comes_again_prepares_once(shard: Shard) -> None:
    first = prepare(shard, UNIQ_KEY="u1")
    again = {**first, "is_repeated": True}
    assert prepare(shard, UNIQ_KEY="u1") == again
    reopen(shard)
    assert prepare(shard, UNIQ_KEY="u1") == again
    assert count(shard, HALF_TOPIC) == 1


def test_an_answer_leaves_when_what_it_says_is_confirmed(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = Shard(tmp_path / "store")
    shard.open(HASTY)
    shard.start_flusher()
    shard.host.call("create_topic", {"name": TOPIC, "queues": 2, "shards": [0]})
    kept = prepare(shard, UNIQ_KEY="kept")["offset"]
    # Nothing is synced any more.
    monkeypatch.setattr(leader, "OPERATION_TIMEOUT_S", 1.0)
    stop_flushers(shard)
    with pytest.raises((DeliveryUnknown, Unavailable)):
        prepare(shard, UNIQ_KEY="lost")
    for _ in range(2):
        with pytest.raises((DeliveryUnknown, Unavailable)):
            end(shard, kept, "commit")
        # It is COMMIT, as far as this leader knows: its record may get lost with it.
        with pytest.raises((DeliveryUnknown, Unavailable)):
            end(shard, kept, "rollback")
        with pytest.raises((DeliveryUnknown, Unavailable)):
            end(shard, kept, "unknown")

    shard.close()
    shard.open(HASTY)
    shard.start_flusher()
    # What was unknown is done, or is not. Asked again, it is done once.
    prepare(shard, UNIQ_KEY="lost")
    assert count(shard, HALF_TOPIC) == 2
    assert end(shard, kept, "commit")[0] == "commit"
    assert seen(shard) == [b"half"]
    shard.close()
    stop_flushers(shard)


def test_the_methods_of_the_actor_take_half_messages_too(shard: Shard) -> None:
    methods = RayMethods(shard.host)
    good = {"topic": TOPIC, "queue_id": 1, "group": GROUP, "properties": {}, "born_time_ms": 1}
    half = methods.call("c", "prepare_half", {**good, "body": b64encode(b"half").decode()})
    asked = methods.call("c", "halves_to_check", {"groups": [GROUP], "max_records": 1})
    assert asked["halves"] == []
    assert 0 < asked["next_ms"] <= 6_000
    ended = {"offset": half["offset"], "group": GROUP, "decision": "commit"}
    assert methods.call("c", "end_half", ended)["outcome"] == "commit"
    assert seen(shard) == [b"half"]


def test_a_half_message_of_an_unknown_topic_or_queue_is_refused(shard: Shard) -> None:
    good = {"queue_id": 1, "group": GROUP, "body": "", "properties": {}, "born_time_ms": 1}
    with pytest.raises(TopicMissing):
        shard.host.call("prepare_half", {**good, "topic": "nope"})
    for topic in (HALF_TOPIC, DISCARD_TOPIC):
        with pytest.raises(Rejected):
            shard.host.call("prepare_half", {**good, "topic": topic})
    with pytest.raises(Rejected, match="queue_id is 5"):
        shard.host.call("prepare_half", {**good, "topic": TOPIC, "queue_id": 5})


@pytest.mark.parametrize(
    ("body", "properties", "field"),
    [
        (b"x" * (4 << 20 | 1), {}, "body"),
        (b"", {"a": "\0" * 512}, "properties"),
        (b"", {"a": "b" * 32_767}, "properties"),
        (b"", {"TAGS": "\0" * 512}, "tag"),
        (b"", {STAMP_NAME: "1"}, "properties"),
        (b"", {"a": "\ud800"}, "properties"),
    ],
    ids=["body", "zeros", "long", "tag", "stamp", "surrogate"],
)
def test_what_cannot_be_put_cannot_be_prepared(
    shard: Shard, body: bytes, properties: dict[str, str], field: str
) -> None:
    with pytest.raises(Rejected) as refused:
        prepare(shard, body, **properties)
    assert refused.value.fields["field"] == field
    assert shard.host.store.queue_range(HALF_TOPIC, 0) == (0, 0)


def test_the_upkeep_of_a_leader_gives_up_old_half_messages_that_no_client_asks_for(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(shard, b"old")
    transactions = leader_of(shard.host).transactions
    transactions.step()
    assert count(shard, DISCARD_TOPIC) == 0
    monkeypatch.setattr(half_messages, "KEPT_MS_MIN", -1)
    monkeypatch.setattr(shard.host.store, "config", _Retention(shard.host.store.config))
    transactions._next_sweep_ms = 0
    transactions.step()
    until(lambda: count(shard, DISCARD_TOPIC) == 1, lambda: threading.Event().wait(0.02))
    assert asked(shard) == []


class _Retention:
    """Options with no retention."""

    file_reserved_hours = -1.0

    def __init__(self, config: object) -> None:
        self._config = config

    def __getattr__(self, name: str) -> object:
        return getattr(self._config, name)
