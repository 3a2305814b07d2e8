"""Puts in RocketMQ's shape: every answer, what leads to it, and that nothing is stored where it says so."""

from __future__ import annotations

import ast
import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raymq.replication.combiner import PutCombiner
from raymq.store.base import running_flags
from raymq.store.base.errors import (
    DeliveryUnknown,
    Rejected,
    StorageFull,
    Unavailable,
)
from raymq.store.base.failpoints import failpoint
from raymq.store.base.files import Files
from raymq.store.base.status import PutStatus
from raymq.store.config.promise import PROMISES, Ends
from raymq.store.config.store_config import StoreConfig
from raymq.store.embedded.embedded_store import EmbeddedStore
from raymq.store.embedded.put_message import MessagePut, PutResult
from raymq.store.engine.message_store import MessageStore
from raymq.store.put.inner_message import InnerMessage
from raymq.store.put.put_errors import ERRORS, error_of, status_of
from raymq.store.put.put_hooks import PutHook
from raymq.store.put.put_lock import BUSY_MAX_MS
from raymq.store.records.properties import decode
from tests.support.batches import batch, request
from tests.support.clock import ManualClock
from tests.support.simulated_disk import SimulatedDisk

ROOT = Path(__file__).resolve().parents[2]
CONFIG = StoreConfig(
    segment_size_bytes=128 * 1024, consume_queue_file_size_bytes=2000, max_message_bytes=8000
)
HELLO = InnerMessage("t", 0, b"hello", {"TAGS": "a"}, born_time_ms=5)


class Bench:
    """A store on a simulated disk whose promises are kept at once, unless `promise` raises."""

    def __init__(self) -> None:
        self.disk = SimulatedDisk(record=False)
        self.clock = ManualClock()
        self.store = MessageStore.open(Path("/s"), config=CONFIG, files=self.disk, clock=self.clock)
        self.promise: Callable[[object], object] = lambda _appended: None
        self.puts = MessagePut(self.store, lambda appended: self.promise(appended))

    def put(self, message: InnerMessage = HELLO) -> PutResult:
        """One put. A refused put has changed nothing."""
        before = self.store.log.end
        result = self.puts.put((message,), is_batch=False)
        assert (result.append is None) == (self.store.log.end == before)
        assert (result.status is PutStatus.PUT_OK) == (result.error is None)
        if result.error is not None:
            assert status_of(result.error) is result.status
        return result


@pytest.fixture
def bench() -> Bench:
    return Bench()


class Refusing(PutHook):
    """Answers every message with one status."""

    def __init__(self, status: PutStatus) -> None:
        self.status = status

    def before_put(self, message: InnerMessage) -> InnerMessage:
        raise error_of(self.status, "the hook says so", field="timer")


# --- every status ---------------------------------------------------------------------------------


def test_put_ok_says_where_the_message_is(bench: Bench) -> None:
    bench.clock.advance(1000)
    first, second = bench.put(), bench.put()
    assert first.status is second.status is PutStatus.PUT_OK
    one, two = first.append, second.append
    assert one is not None
    assert two is not None
    assert (one.logics_offset, two.logics_offset) == (0, 1)
    assert two.wrote_offset == one.wrote_offset + one.wrote_bytes
    assert one.message_ids == (f"7F00000100002A9F{one.wrote_offset:016X}",)
    assert one.store_time_ms == bench.clock.now_ms()


def test_flush_disk_timeout_when_the_flush_does_not_finish(tmp_path: Path) -> None:
    config = replace(CONFIG, sync_flush_timeout_ms=1)
    blocked = threading.Event()
    with failpoint("flush.before_sync", lambda: blocked.wait(20)):
        store = EmbeddedStore(tmp_path, config=config)
        result = store.put_message(HELLO)
        blocked.set()
    assert result.status is PutStatus.FLUSH_DISK_TIMEOUT
    assert result.append is not None
    store.close()


def test_flush_slave_timeout_when_the_replica_is_late_and_its_status_wins(
    bench: Bench,
) -> None:
    combiner = PutCombiner(
        PROMISES["sync", True, "quorum"], flush_timeout_ms=5, replica_timeout_ms=3
    )

    def promise(_appended: object) -> None:
        combiner.add(1, 100, 0)
        (late,) = combiner.combine(Ends(100, 100, 0, 0), 6)
        raise error_of(late.status, "late", append={})

    bench.promise = promise
    assert bench.put().status is PutStatus.FLUSH_SLAVE_TIMEOUT


@pytest.mark.parametrize(
    "flag",
    [
        running_flags.NOT_WRITEABLE,
        running_flags.WRITE_LOGICS_QUEUE_ERROR,
        running_flags.WRITE_INDEX_FILE_ERROR,
        running_flags.DISK_FULL,
        running_flags.FENCED,
        running_flags.LOGIC_DISK_FULL,
    ],
)
def test_service_not_available_while_a_running_flag_forbids_puts(bench: Bench, flag: int) -> None:
    bench.store.topics.create("t", 1, [0])
    assert bench.store.flags.set(flag)
    assert bench.put().status is PutStatus.SERVICE_NOT_AVAILABLE
    # The columnar way and the store's own services are refused alike.
    for put in (
        lambda: bench.store.put(request([b"x"])),
        lambda: bench.store.put_inner([HELLO]),
    ):
        with pytest.raises((Unavailable, StorageFull)) as refused:
            put()
        assert status_of(refused.value) is PutStatus.SERVICE_NOT_AVAILABLE
        full = flag in (running_flags.DISK_FULL, running_flags.LOGIC_DISK_FULL)
        assert isinstance(refused.value, StorageFull) == full
    assert bench.store.flags.clear(flag)
    assert bench.put().status is PutStatus.PUT_OK
    assert bench.store.put(request([b"x"])).first_offset == 1


def test_service_not_available_when_the_store_is_closed(bench: Bench) -> None:
    bench.store.close()
    before = bench.store.log.end
    assert bench.puts.put((HELLO,), is_batch=False).status is PutStatus.SERVICE_NOT_AVAILABLE
    assert bench.store.log.end == before


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_create_mapped_file_failed_when_the_next_file_cannot_be_made(
    bench: Bench, error: int
) -> None:
    while bench.store.log.room() > 9000:
        assert bench.put(replace(HELLO, body=b"x" * 7000)).status is PutStatus.PUT_OK
    bench.disk.fail("allocate", error=error, forever=True)
    results = [bench.put(replace(HELLO, body=b"x" * 7000)) for _ in range(3)]
    assert results[-1].status is PutStatus.CREATE_MAPPED_FILE_FAILED
    assert results[-1].append is None
    bench.disk.heal()
    assert bench.put(replace(HELLO, body=b"x" * 7000)).status is PutStatus.PUT_OK


@pytest.mark.parametrize(
    "message",
    [
        replace(HELLO, topic="x" * 128),
        replace(HELLO, topic="ü" * 64),
        replace(HELLO, topic=""),
        replace(HELLO, topic="%RETRY%" + "x" * 249),
        replace(HELLO, body=None),  # type: ignore[arg-type]
        replace(HELLO, body=b"x" * 8001),
        replace(HELLO, properties={"INNER_NUM": "2"}),
        replace(HELLO, sys_flag=0x80),
        replace(HELLO, properties={"a": "b\x02c"}),
    ],
    ids=["topic", "bytes", "empty", "retry", "body", "large", "inner", "flag", "separator"],
)
def test_message_illegal_for_what_no_store_may_hold(bench: Bench, message: InnerMessage) -> None:
    result = bench.put(message)
    assert result.status is PutStatus.MESSAGE_ILLEGAL
    assert isinstance(result.error, Rejected)


def test_a_retry_topic_may_be_longer_than_others(bench: Bench) -> None:
    assert bench.put(replace(HELLO, topic="%RETRY%" + "x" * 248)).status is PutStatus.PUT_OK


def test_properties_size_exceeded_above_32767_bytes(bench: Bench) -> None:
    fits = {"k": "v" * (32_767 - 3)}
    assert bench.put(replace(HELLO, properties=fits)).status is PutStatus.PUT_OK
    longer = {"k": fits["k"] + "v"}
    assert bench.put(replace(HELLO, properties=longer)).status is PutStatus.PROPERTIES_SIZE_EXCEEDED


def test_os_page_cache_busy_while_an_append_takes_longer_than_the_limit(bench: Bench) -> None:
    limit = CONFIG.os_page_cache_busy_timeout_ms
    bench.store.topics.create("t", 1, [0])
    lock = bench.store.put_path._lock
    with lock:
        for held, busy in ((0, False), (limit, False), (limit + 1, True), (BUSY_MAX_MS, False)):
            lock.begin_ms = bench.clock.monotonic_ms() - held
            assert lock.busy(limit) == busy, held
        lock.begin_ms = bench.clock.monotonic_ms() - limit - 1
        assert bench.put().status is PutStatus.OS_PAGE_CACHE_BUSY
        with pytest.raises(Unavailable) as refused:
            bench.store.put(request([b"x"]))
        assert status_of(refused.value) is PutStatus.OS_PAGE_CACHE_BUSY
    assert bench.put().status is PutStatus.PUT_OK


def test_unknown_error_when_the_disk_fails_under_the_append(bench: Bench) -> None:
    bench.disk.fail("pwrite")
    assert bench.put().status is PutStatus.UNKNOWN_ERROR
    assert bench.put().status is PutStatus.PUT_OK


@pytest.mark.parametrize(
    "status",
    [
        PutStatus.WHEEL_TIMER_FLOW_CONTROL,
        PutStatus.WHEEL_TIMER_MSG_ILLEGAL,
        PutStatus.WHEEL_TIMER_NOT_ENABLE,
    ],
)
def test_wheel_timer_statuses_are_what_the_timer_hook_refuses_with(
    bench: Bench, status: PutStatus
) -> None:
    bench.store.hooks.append(Refusing(status))
    assert bench.put().status is status


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("topic", "../../elsewhere"),
        ("topic", "."),
        ("topic", 5),
        ("queue_id", -1),
        ("queue_id", "0"),
        ("flag", 1 << 31),
        ("born_time_ms", 0.5),
        ("topic", "\ud800"),
        ("born_host", "127.0.0.1"),
        ("born_host", ("127.0.0.1",)),
        ("born_host", ("127.0.0.1", 10, 3)),
        ("born_host", ("127.0.0.1", "10")),
        ("properties", {"a": 5}),
        ("properties", None),
        ("properties", {"a": "\ud800"}),
        ("properties", {"\ud800": "a"}),
        ("properties_text", "a\x01b"),
    ],
)
def test_what_a_record_or_a_directory_has_no_place_for_is_illegal(
    bench: Bench, field: str, value: Any
) -> None:
    end = bench.store.log.end
    result = bench.put(replace(HELLO, **{field: value}))
    assert result.status is PutStatus.MESSAGE_ILLEGAL
    assert isinstance(result.error, Rejected)
    assert result.error.fields["field"] == field
    assert bench.store.log.end == end


#: no call answers these. No put is sent on to another shard. There are no light queues (off in RocketMQ too). A mirror
#: has two replicas, whether they answer or not. RocketMQ 5.x does not answer SLAVE_NOT_AVAILABLE either.
NEVER = {
    PutStatus.SLAVE_NOT_AVAILABLE,
    PutStatus.IN_SYNC_REPLICAS_NOT_ENOUGH,
    PutStatus.PUT_TO_REMOTE_BROKER_FAIL,
    PutStatus.LMQ_CONSUME_QUEUE_NUM_EXCEEDED,
}


def test_nothing_answers_the_statuses_whose_situation_does_not_exist_here() -> None:
    tables = {"store/base/status.py", "store/put/put_errors.py"}
    used = {
        node.attr if isinstance(node, ast.Attribute) else str(getattr(node, "value", ""))
        for part in ("store", "replication", "actors", "client", "cluster")
        for path in (ROOT / part).rglob("*.py")
        if path.relative_to(ROOT).as_posix() not in tables
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.Attribute, ast.Constant))
    }
    assert not {status.value for status in NEVER} & used
    assert PutStatus.OS_PAGE_CACHE_BUSY.value in used


def test_each_status_has_its_error_and_each_error_its_status() -> None:
    assert set(ERRORS) == set(PutStatus) - {PutStatus.PUT_OK}
    for status in ERRORS:
        assert status_of(error_of(status, "x")) is status
    for error, status in (
        (Rejected("x", field="topic"), PutStatus.MESSAGE_ILLEGAL),
        (StorageFull("x"), PutStatus.CREATE_MAPPED_FILE_FAILED),
        (Unavailable("x", status="no such status"), PutStatus.SERVICE_NOT_AVAILABLE),
        (DeliveryUnknown("x"), PutStatus.UNKNOWN_ERROR),
        (OSError(5, "x"), PutStatus.UNKNOWN_ERROR),
    ):
        assert status_of(error) is status


def test_the_table_for_people_has_every_status_and_the_right_error() -> None:
    text = (ROOT / "docs" / "operating" / "runbook.md").read_text(encoding="utf-8")
    rows = {
        cells[1].strip(" `"): cells[2].strip(" `").split("`")[0]
        for line in text.splitlines()
        if len(cells := line.split("|")) > 3 and cells[1].strip(" `") in PutStatus.__members__
    }
    expected = {status.value: kind.__name__ for status, kind in ERRORS.items()}
    assert rows == {"PUT_OK": "Receipt", **expected}


# --- hooks ----------------------------------------------------------------------------------------


class Seen(PutHook):
    """Appends its name to the body, and remembers the results that it was called with."""

    def __init__(self, name: str, *, fails: bool = False) -> None:
        self.name = name
        self.fails = fails
        self.results: list[tuple[bytes, PutStatus]] = []

    def before_put(self, message: InnerMessage) -> InnerMessage:
        return replace(message, topic="moved", body=message.body + self.name.encode())

    def after_put(self, message: InnerMessage, status: PutStatus) -> None:
        self.results.append((message.body, status))
        if self.fails:
            raise RuntimeError(self.name)


def test_hooks_run_in_order_each_on_what_the_one_before_made(bench: Bench) -> None:
    first, second = Seen("1", fails=True), Seen("2")
    bench.store.hooks += [first, second]
    assert bench.put().status is PutStatus.PUT_OK
    assert bench.store.state.next_offsets["moved", 0] == 1
    assert ("t", 0) not in bench.store.state.next_offsets
    assert first.results == second.results == [(b"hello12", PutStatus.PUT_OK)]


def test_a_hook_that_refuses_stops_the_later_ones_and_all_are_notified(bench: Bench) -> None:
    later = Seen("2")
    bench.store.hooks += [Refusing(PutStatus.MESSAGE_ILLEGAL), later]
    assert bench.put().status is PutStatus.MESSAGE_ILLEGAL
    assert later.results == [(b"hello", PutStatus.MESSAGE_ILLEGAL)]


def test_what_a_hook_makes_too_large_is_refused(bench: Bench) -> None:
    bench.store.hooks.append(Seen("x" * 8000))
    assert bench.put().status is PutStatus.MESSAGE_ILLEGAL


# --- batches --------------------------------------------------------------------------------------


def test_a_batch_is_in_one_file_with_consecutive_offsets(bench: Bench) -> None:
    size = CONFIG.segment_size_bytes
    messages = [replace(HELLO, body=b"%d" % i + b"x" * 600) for i in range(10)]
    seen = set()
    for turn in range(40):
        stored = bench.puts.put(tuple(messages), is_batch=True).append
        assert stored is not None
        assert (stored.logics_offset, stored.message_count) == (turn * 10, 10)
        at = [int(message_id[16:], 16) for message_id in stored.message_ids]
        assert at[0] == stored.wrote_offset
        assert at == sorted(at)
        assert at[0] // size == (at[0] + stored.wrote_bytes - 1) // size
        seen.add(at[0] // size)
    assert len(seen) > 1


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [HELLO, replace(HELLO, queue_id=1)],
        [HELLO, replace(HELLO, topic="u")],
        [HELLO, replace(HELLO, sys_flag=0x4)],
        [replace(HELLO, properties={"DELAY": "3"})] * 2,
        [replace(HELLO, topic="%RETRY%g")] * 2,
        [HELLO, replace(HELLO, properties={"WAIT": "false"})],
        [HELLO, replace(HELLO, properties={"INNER_NUM": "2"})],
        [replace(HELLO, body=b"x" * 4001)] * 2,
        [HELLO, replace(HELLO, topic="x" * 128)],
    ],
    ids=["none", "queue", "topic", "txn", "delay", "retry", "wait", "inner", "large", "name"],
)
def test_a_batch_with_what_may_not_be_in_one_is_refused_whole(
    bench: Bench, messages: list[InnerMessage]
) -> None:
    before = bench.store.log.end
    assert bench.puts.put(tuple(messages), is_batch=True).status is PutStatus.MESSAGE_ILLEGAL
    assert bench.store.log.end == before


def test_a_delay_level_that_is_none_does_no_harm_in_a_batch(bench: Bench) -> None:
    none = [replace(HELLO, properties={"DELAY": level}) for level in ("0", "-1", "x")]
    assert bench.puts.put(tuple(none), is_batch=True).status is PutStatus.PUT_OK


# --- WAIT=false -----------------------------------------------------------------------------------


def never(_appended: object) -> object:
    raise AssertionError("no caller waits")


@pytest.mark.parametrize("wait", ["false", "FALSE", "no"])
def test_a_message_that_says_wait_false_is_answered_without_its_promise(
    bench: Bench, wait: str
) -> None:
    bench.promise = never
    message = replace(HELLO, properties={"WAIT": wait})
    assert bench.put(message).status is PutStatus.PUT_OK
    assert bench.puts.put(tuple([message] * 3), is_batch=True).status is PutStatus.PUT_OK


@pytest.fixture
def stuck(tmp_path: Path) -> Iterator[EmbeddedStore]:
    """A store whose flush does not come."""
    store = EmbeddedStore(tmp_path, config=replace(CONFIG, sync_flush_timeout_ms=1))
    store.store.topics.create("t", 1, [0])
    blocked = threading.Event()
    with failpoint("flush.before_sync", lambda: blocked.wait(20)):
        yield store
        blocked.set()
    store.close()


WAIT_FALSE = b"WAIT\x01false\x02"


@pytest.mark.parametrize(
    ("properties", "waits"),
    [
        ([WAIT_FALSE], False),
        ([b"a\x01b\x02" + WAIT_FALSE] * 3, False),
        ([WAIT_FALSE, b"a\x01b\x02"], True),
        ([WAIT_FALSE, None], True),
        ([b"WAIT\x01true\x02"] * 2, True),
        ([b"NOWAIT\x01false\x02"], True),
        ([b"NOWAIT\x01false\x02" + WAIT_FALSE], False),
        ([None, None], True),
    ],
)
def test_a_columnar_batch_skips_the_wait_when_every_row_says_so(
    stuck: EmbeddedStore, properties: list[bytes | None], waits: bool
) -> None:
    assert decode(WAIT_FALSE) == {"WAIT": "false"}
    columns = batch([b"x"] * len(properties)).to_pydict()
    columns["properties"] = properties
    put = request([b"x"])._replace(
        batch=type(batch([b"x"])).from_pydict(columns, schema=batch([b"x"]).schema)
    )
    appended = stuck.append(put)
    assert appended.wait_store_ok == waits
    if waits:
        with pytest.raises(DeliveryUnknown):
            stuck.wait(appended)
    else:
        assert stuck.wait(appended) is appended


# --- an I/O seam ----------------------------------------------------------------------------------


def test_message_puts_store_what_recovery_finds(tmp_path: Path) -> None:
    store = EmbeddedStore(tmp_path, config=CONFIG)
    assert store.put_message(replace(HELLO, reconsume_times=3)).status is PutStatus.PUT_OK
    assert store.put_messages([HELLO] * 4).status is PutStatus.PUT_OK
    assert store.put_message(replace(HELLO, topic="")).status is PutStatus.MESSAGE_ILLEGAL
    store.close()
    again = MessageStore.open(tmp_path, config=CONFIG, files=Files())
    assert again.state.next_offsets["t", 0] == 5
    again.close()


# --- delays ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "properties", "status"),
    [
        ({}, {"TIMER_DELAY_SEC": "259201"}, PutStatus.WHEEL_TIMER_MSG_ILLEGAL),
        ({}, {"TIMER_DELIVER_MS": "soon"}, PutStatus.WHEEL_TIMER_MSG_ILLEGAL),
        (
            {"timer_wheel_enabled": False},
            {"TIMER_DELAY_MS": "5000"},
            PutStatus.WHEEL_TIMER_NOT_ENABLE,
        ),
        (
            {"timer_congest_num_each_slot": 0},
            {"TIMER_DELAY_MS": "5000"},
            PutStatus.WHEEL_TIMER_FLOW_CONTROL,
        ),
    ],
)
def test_a_time_that_cannot_be_kept_is_refused_with_rocketmqs_status(
    tmp_path: Path, options: dict[str, object], properties: dict[str, str], status: PutStatus
) -> None:
    with closing(EmbeddedStore(tmp_path, config=replace(CONFIG, **options))) as store:
        store.create_topic("t", 1)
        end = store.store.log.end
        result = store.put_message(replace(HELLO, topic="t", queue_id=0, properties=properties))
        assert (result.status, result.append) == (status, None)
        assert store.store.log.end == end


def test_a_delayed_message_waits_in_its_level_and_is_then_delivered(tmp_path: Path) -> None:
    clock = ManualClock()
    with closing(EmbeddedStore(tmp_path, config=CONFIG, clock=clock)) as store:
        store.create_topic("t", 1)
        message = replace(HELLO, topic="t", queue_id=0, properties={"DELAY": "2"})
        assert store.put_message(message).status is PutStatus.PUT_OK
        store.fetch("t", 0, 0)
        assert store.store.queue_range("SCHEDULE_TOPIC_XXXX", 1) == (0, 1)
        store.deliver_due()
        assert store.fetch("t", 0, 0).max_offset == 0
        clock.advance(5000)
        store.deliver_due()
        assert store.fetch("t", 0, 0).max_offset == 1
