"""Leases of messages that are hard to copy, and groups whose offsets, topics, sessions and options others change."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raymq.store import InnerMessage
from raymq.store.base.errors import Rejected, Unavailable
from raymq.store.base.format import SCHEDULE_TOPIC
from raymq.store.groups.leases import lease_machine
from raymq.store.groups.leases.entries import SettleOutcome
from raymq.store.groups.leases.options import LeaseOptions
from raymq.store.groups.leases.requests import LeaseRequest, SettleItem, SettleRequest, offsets_of
from raymq.store.records.dead_letter import DEAD_HOLDER, DEAD_REASON
from raymq.store.services.lease_offers import LOOK_OFFSETS_MIN, LeaseOffers, Wanted
from raymq.store.services.leases import LeaseService
from raymq.store.state.features import PAUSES_LEVEL, feature_level
from raymq.store.state.topics import dlq_topic, retry_topic
from tests.support.engine import Engine

from .test_leases import KEY, MINUTE, Workers, count, put

HOUR = 60 * MINUTE


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = Engine(tmp_path)
    yield made
    made.store.close()


def put_large(engine: Engine, body_bytes: int, **properties: str) -> None:
    engine.store.put_inner([InnerMessage("t", 0, b"x" * body_bytes, properties)])
    engine.confirm()


def stored(engine: Engine, topic: str) -> int:
    engine.confirm()
    return count(engine.store, topic)


def low(engine: Engine) -> int:
    return engine.store.state.offsets["g", "t"][0]


# --- copies ---------------------------------------------------------------------------------------


def test_a_dead_message_that_no_worker_holds_is_copied(engine: Engine) -> None:
    put(engine, 2)
    workers = Workers(engine.store)
    workers.offsets(1)
    workers.settle(1, [0], SettleOutcome.NACKED, 0)
    workers.service.configure("g", LeaseOptions(max_attempts=1))
    assert workers.offsets(1) == [1]
    (dead,) = engine.read(dlq_topic("g"), 0)
    assert dead.properties[DEAD_REASON] == "its last lease ended"
    assert DEAD_HOLDER not in dead.properties


def test_a_message_that_a_worker_without_a_session_rejects_is_copied(engine: Engine) -> None:
    put(engine, 1)
    service = LeaseService(engine.store)
    service.lease("g", LeaseRequest(b"", 0, 1), [KEY])
    item = SettleItem(1, KEY, offsets_of([0]), SettleOutcome.REJECTED)
    service.settle("g", SettleRequest(b"", 0, [item]))
    (dead,) = engine.read(dlq_topic("g"), 0)
    assert dead.properties[DEAD_REASON] == "rejected"
    assert DEAD_HOLDER not in dead.properties


def test_a_message_with_long_properties_is_copied_with_these_alone(engine: Engine) -> None:
    put_large(engine, 1, NAME="x" * 32_700)
    put(engine, 1)
    workers = Workers(engine.store)
    workers.offsets(1)
    assert workers.settle(1, [0], SettleOutcome.REJECTED) == []
    (dead,) = engine.read(dlq_topic("g"), 0)
    assert dict(dead.properties) == {"NAME": "x" * 32_700}
    assert dead.reconsume_times == 1
    assert workers.offsets(1) == [1]


def test_a_message_that_no_record_has_room_for_is_settled_without_a_copy(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    put_large(engine, engine.store.config.record_bytes_max - 300)
    put(engine, 1)
    workers = Workers(engine.store, max_attempts=1)
    workers.offsets(1)
    # Its last lease ends without a word of its worker.
    engine.clock.advance(2 * MINUTE)
    assert workers.offsets(1) == [1]
    assert low(engine) == 1
    assert stored(engine, dlq_topic("g")) == 0
    assert workers.service.uncopied_count == 1
    assert "settled without its copy for %DLQ%g: the copy makes a record of" in caplog.text


def test_a_message_that_the_retry_topic_has_no_room_for_waits_where_it_is(engine: Engine) -> None:
    put_large(engine, engine.store.config.record_bytes_max - 300)
    put(engine, 1)
    workers = Workers(engine.store)
    workers.offsets(2)
    assert workers.settle(1, [0, 1], SettleOutcome.NACKED, 2 * MINUTE) == []
    assert stored(engine, SCHEDULE_TOPIC) == 1
    engine.clock.advance(2 * MINUTE - 1)
    assert workers.offsets(1) == []
    engine.clock.advance(1)
    assert workers.offsets(1) == [0]
    assert workers.service.uncopied_count == 0


def test_a_longer_delay_than_the_retry_topic_knows_is_waited_for_in_place(engine: Engine) -> None:
    put(engine, 1)
    workers = Workers(engine.store)
    workers.offsets(1)
    workers.settle(1, [0], SettleOutcome.NACKED, 3 * HOUR)
    assert stored(engine, SCHEDULE_TOPIC) == 0
    engine.clock.advance(3 * HOUR - 1)
    assert workers.offsets(1) == []
    engine.clock.advance(1)
    assert workers.offsets(1) == [0]


def test_copies_with_large_properties_are_appended_in_several_steps(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(10):
        put_large(engine, 1, NAME="x" * 30_000)
    workers = Workers(engine.store)
    workers.offsets(10)
    reads = []
    fetch = engine.store.fetch_whole

    def look(*args: Any, **options: Any) -> Any:
        reads.append(args)
        return fetch(*args, **options)

    monkeypatch.setattr(engine.store, "fetch_whole", look)
    assert workers.settle(1, list(range(10)), SettleOutcome.REJECTED) == []
    # No more than may be appended together.
    assert len(reads) <= 4
    for _ in range(10):
        workers.offsets(1)
        engine.confirm()
    assert stored(engine, dlq_topic("g")) == 10
    assert low(engine) == 10


def test_messages_are_read_and_encoded_without_the_put_lock(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(engine, 5)
    workers = Workers(engine.store, max_attempts=1)
    workers.offsets(5)
    fetch, lock = engine.store.fetch_whole, engine.store.inner_put._lock.thread_lock
    reads = []

    def look(*args: Any, **options: Any) -> Any:
        reads.append(lock.locked())
        return fetch(*args, **options)

    monkeypatch.setattr(engine.store, "fetch_whole", look)
    workers.settle(1, [0, 1], SettleOutcome.REJECTED)
    workers.settle(1, [2], SettleOutcome.NACKED)
    engine.clock.advance(2 * MINUTE)
    workers.offsets(2)
    assert reads == [False] * 5
    assert stored(engine, dlq_topic("g")) == 5


def test_topics_for_copies_that_were_deleted_are_made_again(engine: Engine) -> None:
    put(engine, 3)
    workers = Workers(engine.store)
    workers.offsets(3)
    engine.store.topics.delete(dlq_topic("g"))
    assert workers.settle(1, [0], SettleOutcome.REJECTED) == []
    engine.store.topics.delete(dlq_topic("g"))
    assert workers.settle(1, [1], SettleOutcome.REJECTED) == []
    engine.store.topics.delete(retry_topic("g"))
    assert workers.settle(1, [2], SettleOutcome.NACKED, 2 * MINUTE) == []
    (dead,) = engine.read(dlq_topic("g"), 0)
    assert dead.body == b"work 1"
    assert retry_topic("g") in engine.store.state.topics
    assert stored(engine, SCHEDULE_TOPIC) == 1


def test_any_number_of_earlier_deliveries_is_taken(engine: Engine) -> None:
    queue = (retry_topic("g"), 0)
    workers = Workers(engine.store, max_attempts=None)
    workers.offsets(1)
    for times in (70_000, -1):
        engine.store.put_inner([InnerMessage(queue[0], 0, b"work", reconsume_times=times)])
    engine.confirm()
    (part,) = workers.lease(2, queue).parts
    assert part.attempts.tolist() == [65_535, 1]


# --- what others change ---------------------------------------------------------------------------


def test_offsets_that_others_commit_after_the_workers_hold(engine: Engine) -> None:
    put(engine, 10)
    workers = Workers(engine.store)
    workers.offsets(4)
    with pytest.raises(Rejected, match="their settlements commit its offsets"):
        engine.store.commit_offsets("g", "t", {0: 9})
    workers.settle(1, [0, 1, 2, 3])
    engine.store.commit_offsets("g", "t", {0: 8})
    assert workers.offsets(1) == [8]
    workers.settle(2, [8])
    assert low(engine) == 9
    engine.store.commit_offsets("g", "t", {0: 2})
    assert workers.offsets(2) == [2, 3]


def test_a_committed_offset_whose_message_is_deleted_is_no_other_place(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(engine, 10)
    workers = Workers(engine.store)
    workers.offsets(4)
    workers.settle(1, [0, 1, 2, 3])
    monkeypatch.setattr(engine.store, "queue_range", lambda topic, queue_id: (4, 10))
    engine.store.commit_offsets("g", "t", {0: 1})
    assert workers.offsets(1) == [4]
    assert low(engine) == 1
    workers.settle(2, [4])
    assert low(engine) == 5


def test_a_reset_to_where_the_workers_are_holds(engine: Engine) -> None:
    put(engine, 10)
    workers = Workers(engine.store)
    workers.offsets(4)
    workers.settle(1, [0, 1, 2, 3])
    engine.store.commit_offsets("g", "t", {0: 8})
    workers.service.reset("g", KEY, 4)
    assert low(engine) == 4
    assert workers.offsets(1) == [4]


def test_offsets_that_rocketmq_has_changed_in_its_file_hold(engine: Engine) -> None:
    put(engine, 10)
    workers = Workers(engine.store)
    workers.offsets(4)
    workers.settle(1, [0, 2])
    engine.store.close()
    file = engine.root / "config" / "consumerOffset.json"
    text = file.read_text()
    assert '"t@g"' in text
    file.write_text(json.dumps({"dataVersion": {"counter": 99}, "offsetTable": {"t@g": {"0": 8}}}))
    engine.open()

    again = Workers(engine.store)
    again.requests, again.settled = workers.requests, workers.settled
    assert again.settle(1, [1]) == [1]
    assert low(engine) == 8
    assert again.offsets(9) == [8, 9]


def test_a_queue_that_is_deleted_meanwhile_is_asked_for_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(engine, 1)
    workers = Workers(engine.store)
    prepare = workers.service._prepare

    def delete(*args: Any) -> None:
        prepare(*args)
        engine.store.topics.delete("t")

    monkeypatch.setattr(workers.service, "_prepare", delete)
    with pytest.raises(Unavailable, match="was deleted or reset for group g meanwhile"):
        workers.offsets(1)


def test_a_compacted_topic_is_not_leased(engine: Engine) -> None:
    engine.store.topics.create("latest", 1, [0], {"cleanup.policy": "COMPACTION"})
    with pytest.raises(Rejected, match="topic latest is compacted"):
        Workers(engine.store).offsets(1, ("latest", 0))


def test_a_reset_notes_the_level_of_its_record(engine: Engine) -> None:
    LeaseService(engine.store).reset("g", KEY, 0)
    assert feature_level(engine.store.state.progress) == PAUSES_LEVEL


def test_a_request_looks_at_few_messages(engine: Engine) -> None:
    put(engine, LOOK_OFFSETS_MIN + 10)
    wanted = Wanted(1, 1 << 20, None, has_keys=False)
    offer = LeaseOffers(engine.store).look(KEY, 0, LOOK_OFFSETS_MIN + 10, wanted)
    assert (offer.first, offer.stop) == (0, LOOK_OFFSETS_MIN)


# --- sessions, times ------------------------------------------------------------------------------


def test_idle_sessions_of_groups_that_nothing_asks_for_are_forgotten(engine: Engine) -> None:
    put(engine, 1)
    workers = Workers(engine.store)
    workers.offsets(1)
    workers.settle(1, [0])
    # Another leader hears nothing of the group.
    service = LeaseService(engine.store)
    service.forget_idle()
    assert engine.store.leases.groups["g"].sessions
    engine.clock.advance(HOUR)
    service.forget_idle()
    assert not engine.store.leases.groups["g"].sessions


def test_groups_that_have_nothing_are_forgotten(engine: Engine) -> None:
    put(engine, 1)
    workers = Workers(engine.store)
    workers.offsets(1)
    service = workers.service
    for number in range(5):
        service.extend(f"unknown{number}", b"s")
        service.configure(f"unknown{number}", LeaseOptions())
    service.forget_idle(in_use={"unknown4"})
    assert list(service._decisions._machines) == ["g"]
    assert not engine.store.leases._coming
    assert set(service._decisions.options) == {"g", "unknown4"}

    engine.store.topics.delete("t")
    engine.store.topics.delete(retry_topic("g"))
    engine.clock.advance(HOUR)
    service.forget_idle()
    assert not engine.store.leases.groups
    assert not service._decisions._machines


def test_leases_can_be_renewed_by_their_numbers(engine: Engine) -> None:
    put(engine, 2)
    workers = Workers(engine.store, backoff_ms=(0,))
    workers.offsets(1)
    workers.offsets(1)
    engine.clock.advance(MINUTE // 2)
    workers.service.extend("g", b"s", numbers=np.array([2]).tolist())
    engine.clock.advance(MINUTE // 2)
    assert workers.offsets(2) == [0]


def test_an_operator_takes_back_what_workers_hold(engine: Engine) -> None:
    put(engine, 4)
    put(engine, 1, queue_id=1)
    workers = Workers(engine.store)
    workers.offsets(3)
    workers.offsets(1, ("t", 1))
    workers.settle(1, [1])
    workers.service.release("g", "other")
    assert engine.store.leases.groups["g"].in_flight == 3
    workers.service.release("g", "t")
    assert engine.store.leases.groups["g"].in_flight == 0
    assert workers.settle(1, [0]) == [0]
    (part,) = workers.lease(2).parts
    assert part.offsets.tolist() == [0, 2]
    assert part.attempts.tolist() == [2, 2]


def test_leases_that_one_record_cannot_take_back_are_taken_back_by_several(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_machine, "RELEASED_MAX", 3)
    put(engine, 8)
    workers = Workers(engine.store)
    for _ in range(8):
        workers.offsets(1)
    workers.service.release("g")
    assert workers.offsets(9) == list(range(8))


def test_a_leader_begins_the_times_of_leases_that_nothing_asks_for(engine: Engine) -> None:
    put(engine, 3)
    workers = Workers(engine.store, backoff_ms=(0,))
    workers.offsets(1)
    engine.clock.advance(MINUTE - 1)
    engine.crash()

    again = Workers(engine.store, backoff_ms=(0,))
    again.requests = workers.requests
    again.service.activate()
    engine.clock.advance(MINUTE - 1)
    # Never earlier than a whole lease later; and then at once, although this is the first request.
    assert again.offsets(1) == [1]
    engine.clock.advance(1)
    assert again.offsets(1) == [0]


def test_another_order_leaves_the_times_of_leases(engine: Engine) -> None:
    put(engine, 3)
    workers = Workers(engine.store, backoff_ms=(0,))
    workers.offsets(1)
    engine.clock.advance(MINUTE - 1)
    workers.service.configure("g", LeaseOptions(order="key", backoff_ms=(0,)))
    assert workers.offsets(1) == []
    engine.clock.advance(1)
    assert workers.offsets(1) == [0]
