"""A replica that does not lead appends nothing: neither puts, nor messages of its services, nor state records."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from raymq.store.base.errors import NotServing, RayMQError
from raymq.store.base.format import SCHEDULE_TOPIC
from raymq.store.base.running_flags import DISK_FULL, FENCED
from raymq.store.base.status import PutStatus
from raymq.store.config.store_config import StoreConfig
from raymq.store.delay.delay_service import DelayService
from raymq.store.embedded.put_message import MessagePut
from raymq.store.engine.message_store import MessageStore
from raymq.store.put.inner_message import InnerMessage, ServiceProgress
from raymq.store.put.put_errors import status_of
from raymq.store.records.requests import AppendedRows
from raymq.store.services.retry import send_back
from raymq.store.services.transaction import TransactionService
from tests.support.batches import request
from tests.support.clock import ManualClock
from tests.support.confirming import confirm
from tests.support.simulated_disk import SimulatedDisk

CONFIG = StoreConfig(segment_size_bytes=64 * 1024, consume_queue_file_size_bytes=2000)
ROOT = Path("/s")
MESSAGE = InnerMessage("t", 0, b"x")


def open_store(disk: SimulatedDisk) -> MessageStore:
    return MessageStore.open(ROOT, config=CONFIG, files=disk, clock=ManualClock())


@pytest.fixture
def store() -> MessageStore:
    """A store with a message that is due, and a half message."""
    made = open_store(SimulatedDisk())
    made.begin_epoch(1)
    made.topics.create("t", 1, [0])
    made.put_inner([InnerMessage(SCHEDULE_TOPIC, 0, b"later", {"DELAY": "1"})])
    made.put(request([b"x"]))
    TransactionService(made).prepare(MESSAGE)
    confirm(made)
    made.clock.advance(10_000)  # type: ignore[attr-defined]
    return made


def put_checked(store: MessageStore) -> None:
    """Both ways in which a host appends batches."""
    checked = store.put_path.check(request([b"y"]))
    store.put_path.append(checked)


def put_message(store: MessageStore) -> None:
    result = MessagePut(store, lambda appended: appended).put((MESSAGE,), is_batch=False)
    assert result.error is not None
    raise result.error


#: everything that appends, but for `begin_epoch`
APPENDS: dict[str, Callable[[MessageStore], object]] = {
    "put": lambda store: store.put(request([b"y"])),
    "put of a producer": lambda store: store.put(request([b"y"], producer_id=7)),
    "single message": put_message,
    "inner message": lambda store: store.put_inner([MESSAGE]),
    "group": lambda store: store.put_inner([MESSAGE], progress=ServiceProgress("s", {"k": 1})),
    "progress": lambda store: store.put_inner([], progress=ServiceProgress("s", {"k": 1})),
    "delivery": lambda store: DelayService(store).run_once(store.clock.now_ms()),
    "half message": lambda store: TransactionService(store).prepare(MESSAGE),
    "transaction commit": lambda store: TransactionService(store).commit(0),
    "sent back": lambda store: send_back(store, "g", "t", 0, 0),
    "topic": lambda store: store.topics.create("u", 1, [0]),
    "offsets": lambda store: store.commit_offsets("g", "t", {0: 1}),
    "producer": lambda store: store.inner_put.init_producer(7),
    "fence": lambda store: store.inner_put.fence_producer(7, 1),
    "state record": lambda store: store.inner_put.put_state_record("TOPIC", b"{}"),
}


def check_refused(store: MessageStore, append: Callable[[MessageStore], object]) -> None:
    end, before = store.log.end, store.state.snapshot(1 << 20)
    with pytest.raises(NotServing) as refused:
        append(store)
    assert status_of(refused.value) is PutStatus.SERVICE_NOT_AVAILABLE
    assert (store.log.end, store.state.snapshot(1 << 20)) == (end, before)


@pytest.mark.parametrize("name", APPENDS)
def test_a_fenced_store_refuses_every_append(store: MessageStore, name: str) -> None:
    store.flags.set(FENCED)
    check_refused(store, APPENDS[name])
    # Another flag beside it makes no other error of it.
    store.flags.set(DISK_FULL)
    check_refused(store, APPENDS[name])


@pytest.mark.parametrize("name", APPENDS)
def test_a_store_that_follows_refuses_every_append(store: MessageStore, name: str) -> None:
    store.follow()
    check_refused(store, APPENDS[name])
    store.flags.set(DISK_FULL)
    check_refused(store, APPENDS[name])


@pytest.mark.parametrize("fence", [lambda s: s.flags.set(FENCED), lambda s: s.follow()])
def test_a_put_that_was_checked_before_is_refused(
    store: MessageStore, fence: Callable[[MessageStore], object]
) -> None:
    path = store.put_path
    large = path.check(request([b"z" * 20_000] * 2))
    small = [path.check(request([b"y"])) for _ in range(3)]
    fence(store)
    check_refused(store, lambda _: path.append(large))
    end = store.log.end
    for puts in (small, [*small, large], [large, small[0]]):
        answers = path.append_many(puts)
        assert [type(answer) for answer in answers] == [NotServing] * len(puts)
    assert store.log.end == end


def test_an_inner_put_that_was_checked_before_is_refused(
    store: MessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = store.put_path.check_open

    def check_and_fence() -> None:
        check()
        store.flags.set(FENCED)

    monkeypatch.setattr(store.inner_put, "_check_open", check_and_fence)
    check_refused(store, APPENDS["group"])


def test_an_epoch_begins_while_the_store_is_fenced(store: MessageStore) -> None:
    store.flags.set(FENCED)
    store.begin_epoch(2)
    assert store.log.last_epoch == 2
    store.flags.clear(FENCED)
    for name in ("put", "group", "topic", "offsets", "producer"):
        APPENDS[name](store)


def test_an_epoch_does_not_begin_beside_another_leaders_log(store: MessageStore) -> None:
    store.follow()
    check_refused(store, lambda each: each.begin_epoch(2))
    store.lead(2)
    assert isinstance(APPENDS["offsets"](store), AppendedRows)


def test_state_records_go_on_over_a_full_disk(store: MessageStore) -> None:
    store.flags.set(DISK_FULL)
    for name in ("topic", "offsets", "producer"):
        APPENDS[name](store)
    with pytest.raises(RayMQError, match="DISK_FULL"):
        APPENDS["group"](store)
