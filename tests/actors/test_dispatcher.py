"""The reads of a shard, and those that wait for messages."""

from __future__ import annotations

import errno
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from raymq.actors.api import held_fetch
from raymq.actors.shared.failures import ActiveFailures
from raymq.actors.supervise import dispatcher as dispatcher_module
from raymq.actors.supervise.dispatcher import Dispatcher
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Bug, OffsetOutOfRange, Rejected, Unavailable
from raymq.store.base.files import Files, PathLike
from raymq.store.base.running_flags import LOGIC_DISK_FULL
from raymq.store.config.store_config import StoreConfig
from raymq.store.embedded.embedded_store import EmbeddedStore
from raymq.store.engine.message_store import MessageStore
from raymq.store.queues import reader
from raymq.store.queues.consume_queue import BLANK_SIZE
from raymq.store.queues.message_filter import RECORDS_AT_ONCE
from raymq.store.queues.raw_records import decode_records
from raymq.store.records.requests import FetchRequest, FetchSlice, MessageSelector, PutRequest
from tests.support.batches import batch
from tests.support.clock import ManualClock
from tests.support.confirming import confirm, confirm_only, dispatch_all
from tests.support.waiting import until

CONFIG = StoreConfig(segment_size_bytes=256 * 1024, consume_queue_file_size_bytes=20_000)


def test_a_unit_that_points_at_nothing_is_made_again_by_the_read_that_meets_it(
    tmp_path: Path,
) -> None:
    with closing(EmbeddedStore(tmp_path)) as embedded:
        store = embedded.store
        embedded.create_topic("t", 1)
        embedded.put(PutRequest("t", 0, batch([b"%d" % n for n in range(8)]), None, 0, 0, "quorum"))
        assert embedded.fetch("t", 0, 0).next_offset == 8
        blank = struct.pack(">qiq", 0, BLANK_SIZE, 0)
        with (store.consume_queues.get("t", 0).directory / f"{0:020}").open("r+b") as file:
            file.seek(2 * len(blank))
            file.write(5 * blank)
        dispatcher = Dispatcher(store, clock=ManualClock(), on_dispatched=lambda: None)
        found = []
        offset = 0
        while offset < 8:
            (part,) = dispatcher.fetch(FetchRequest("t", {0: offset}, 1 << 20, 10, 0))
            assert part.error is None
            found += decode_records(part.records)["body"].to_pylist()
            offset = part.next_offset
        assert found == [b"%d" % n for n in range(8)]


def test_a_read_waits_for_the_dispatch_only_where_its_queue_has_more(tmp_path: Path) -> None:
    with closing(MessageStore.open(tmp_path)) as store:
        store.topics.create("t", 2, [0])
        store.put(PutRequest("t", 1, batch([b"first"]), None, 0, 0, "quorum"))
        confirm(store)
        store.put(PutRequest("t", 0, batch([b"second"]), None, 0, 0, "quorum"))
        store.log.sync()
        store.log.note_confirmed(store.log.end)
        # Time does not pass: a read that waits checks again only when it is woken.
        dispatcher = Dispatcher(store, clock=ManualClock(), on_dispatched=lambda: None)
        assert dispatcher.fetch(FetchRequest("t", {1: 1}, 1 << 20, 10, 0)) == []
        found: list[int] = []

        def read() -> None:
            parts = dispatcher.fetch(FetchRequest("t", {0: 0, 1: 1}, 1 << 20, 10, 0))
            found.extend(part.next_offset for part in parts)

        reader = threading.Thread(target=read)
        # Otherwise the read would dispatch by itself, perhaps before this thread sees it wait.
        with dispatcher.paused():
            reader.start()
            until(lambda: ("t", 0) in dispatcher._waiting_reads, lambda: reader.join(0.001))
            dispatch_all(store)
        dispatcher.wake_readers()
        reader.join()
        assert found == [1]


def test_a_read_sees_what_was_dispatched_right_after_it_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(MessageStore.open(tmp_path)) as store:
        store.topics.create("t", 1, [0])
        confirm(store)
        store.put(PutRequest("t", 0, batch([b"first"]), None, 0, 0, "quorum"))
        store.log.sync()
        store.log.note_confirmed(store.log.end)
        dispatcher = Dispatcher(store, clock=ManualClock(), on_dispatched=lambda: None)
        look = dispatcher._read

        def look_too_early(request: FetchRequest) -> list[FetchSlice]:
            found = look(request)
            dispatch_all(store)
            return found

        monkeypatch.setattr(dispatcher, "_read", look_too_early)
        (part,) = dispatcher.fetch(FetchRequest("t", {0: 0}, 1 << 20, 10, 0))
        assert part.next_offset == 1


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine changes no answer of a fetch with a filter."""
    monkeypatch.setattr(held_fetch, "IN_VAIN_MS", 600_000)
    monkeypatch.setattr(held_fetch, "LOOKED_MS_MAX", 600_000)
    monkeypatch.setattr(dispatcher_module, "LOOK_MS", 600_000)


class Shard:
    """A store whose records are confirmed at once, and its dispatcher with its thread."""

    def __init__(self, root: Path, files: Files | None = None) -> None:
        self.store = MessageStore.open(root, config=CONFIG, files=files)
        self.failures = ActiveFailures()
        self.dispatcher = Dispatcher(
            self.store, clock=Clock(), on_dispatched=lambda: None, failures=self.failures
        )
        self.ended: list[BaseException | None] = []
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self.dispatcher.run()
        except Exception as error:
            self.ended.append(error)

    def start(self) -> None:
        self.thread.start()

    def put(self, topic: str, count: int = 1, queue: int = 0, *, tag: str | None = None) -> None:
        rows = batch([b"x"] * count, tag=tag)
        self.store.put(PutRequest(topic, queue, rows, None, 0, 0, "quorum"))
        confirm_only(self.store)
        self.dispatcher.wake()

    def fetch(
        self, topic: str, offset: int, wait_ms: int, *, tag: str | None = None
    ) -> list[FetchSlice]:
        wanted = None if tag is None else MessageSelector("TAG", tag)
        request = FetchRequest(topic, {0: offset}, 1 << 20, 10, wait_ms, wanted=wanted)
        return self.dispatcher.fetch(request)

    def begin_fetch(
        self, topic: str, offset: int, wait_ms: int, *, tag: str | None = None
    ) -> Future[list[FetchSlice]]:
        done: Future[list[FetchSlice]] = Future()

        def read() -> None:
            try:
                done.set_result(self.fetch(topic, offset, wait_ms, tag=tag))
            except Exception as error:
                done.set_exception(error)

        threading.Thread(target=read).start()
        return done

    def close(self) -> None:
        self.dispatcher.stop()
        if self.thread.ident is not None:
            self.thread.join()
        self.store.close()


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[Shard]:
    with closing(Shard(tmp_path / "store")) as made:
        for topic in ("slow", "quick", "t"):
            made.store.topics.create(topic, 1, [0])
        confirm_only(made.store)
        yield made


def test_a_slow_read_of_one_topic_does_not_delay_readers_of_another(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard.start()
    shard.put("slow")
    reading, go_on = threading.Event(), threading.Event()
    fetch = shard.store.fetch

    def slowly(topic: str, *args: Any, **options: Any) -> FetchSlice:
        if topic == "slow":
            reading.set()
            assert go_on.wait(30)
        return fetch(topic, *args, **options)

    monkeypatch.setattr(shard.store, "fetch", slowly)
    slow = shard.begin_fetch("slow", 0, 10_000)
    assert reading.wait(30)
    quick = shard.begin_fetch("quick", 0, 10_000)
    until(lambda: ("quick", 0) in shard.dispatcher._waiting_reads, lambda: reading.wait(0.001))
    shard.put("quick")
    assert quick.result(10)[0].next_offset == 1
    assert not slow.done()
    go_on.set()
    assert slow.result(10)[0].next_offset == 1


def test_a_put_wakes_only_the_readers_of_its_queue(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard.start()
    looks: Counter[str] = Counter()
    fetch = shard.store.fetch

    def counted(topic: str, *args: Any, **options: Any) -> FetchSlice:
        looks[topic] += 1
        return fetch(topic, *args, **options)

    monkeypatch.setattr(shard.store, "fetch", counted)
    idle = shard.begin_fetch("quick", 0, 60_000)
    # One read before it is registered, one after.
    until(lambda: looks["quick"] == 2, lambda: threading.Event().wait(0.001))
    for offset in range(20):
        waiting = shard.begin_fetch("t", offset, 10_000)
        until(lambda: ("t", 0) in shard.dispatcher._waiting_reads, lambda: idle.done())
        shard.put("t")
        assert waiting.result(10)[0].next_offset == offset + 1
    assert looks["quick"] == 2
    shard.put("quick")
    assert idle.result(10)[0].next_offset == 1
    assert not shard.dispatcher._waiting_reads


def test_a_message_for_a_waiting_reader_ends_the_linger_time(shard: Shard) -> None:
    shard.dispatcher.linger_s = 60.0
    shard.start()
    pause = threading.Event()
    # The dispatch lingers when the reader comes, and nothing is confirmed for the reader yet.
    shard.put("quick")
    waiting = shard.begin_fetch("t", 0, 60_000)
    until(lambda: ("t", 0) in shard.dispatcher._waiting_reads, lambda: pause.wait(0.001))
    shard.put("t")
    assert waiting.result(30)[0].next_offset == 1
    # A reader that comes after the message waits no longer.
    shard.put("t")
    assert shard.begin_fetch("t", 1, 60_000).result(30)[0].next_offset == 2


def places(found: list[FetchSlice]) -> list[tuple[int, int, int]]:
    """First offset, next offset and records of each slice."""
    return [
        (part.first_offset, part.next_offset, 0 if part.records is None else len(part.records))
        for part in found
    ]


def test_a_fetch_with_a_filter_is_held_until_a_wanted_message_comes(shard: Shard) -> None:
    shard.start()
    shard.put("t", 3, tag="other")
    waiting = shard.begin_fetch("t", 0, 60_000, tag="wanted")
    until(
        lambda: ("t", 0) in shard.dispatcher._waiting_reads, lambda: threading.Event().wait(0.001)
    )
    shard.put("t", 2, tag="other")
    shard.put("t", 1, tag="wanted")
    shard.put("t", 1, tag="other")
    (part,) = waiting.result(30)
    # Whether the last message was there already is chance.
    assert (part.first_offset, len(part.records)) == (0, 1)
    assert part.next_offset in (6, 7)


def test_a_fetch_without_a_wanted_message_says_how_far_it_looked(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard.put("t", 10, tag="other")
    dispatch_all(shard.store)
    assert places(shard.fetch("t", 2, 0, tag="wanted")) == [(2, 10, 0)]
    assert places(shard.fetch("t", 10, 0, tag="wanted")) == []
    # A read looks at a part of the queue. One that may wait looks at all of it.
    monkeypatch.setattr(reader, "FILTERED_UNITS", 3)
    assert places(shard.fetch("t", 0, 0, tag="wanted")) == [(0, 3, 0)]
    assert places(shard.fetch("t", 0, 1, tag="wanted"))[0][1] > 3
    shard.put("t", 1, tag="wanted")
    dispatch_all(shard.store)
    assert places(shard.fetch("t", 0, 60_000, tag="wanted")) == [(0, 11, 1)]


def test_queues_that_were_looked_at_in_vain_are_in_the_answer_of_one_with_messages(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard.store.topics.create("two", 2, [0])
    confirm_only(shard.store)
    shard.put("two", 6, tag="other")
    shard.put("two", 7, queue=1, tag="other")
    shard.put("two", 1, queue=1, tag="wanted")
    dispatch_all(shard.store)
    monkeypatch.setattr(reader, "FILTERED_UNITS", 4)
    wanted = MessageSelector("TAG", "wanted")
    request = FetchRequest("two", {0: 0, 1: 0}, 1 << 20, 10, 60_000, wanted=wanted)
    found = {part.queue_id: part for part in shard.dispatcher.fetch(request)}
    assert places([found[0]]) == [(0, 6, 0)]
    assert places([found[1]]) == [(0, 8, 1)]


def test_one_look_of_a_filter_shares_its_units_among_the_queues(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard.store.topics.create("two", 2, [0])
    confirm_only(shard.store)
    for queue in (0, 1):
        shard.put("two", 6, queue=queue, tag="other")
    dispatch_all(shard.store)
    monkeypatch.setattr(reader, "FILTERED_UNITS", 8)
    looks: list[int] = []
    read = shard.dispatcher._read

    def counted(request: FetchRequest) -> list[FetchSlice]:
        found = read(request)
        looks.append(sum(part.next_offset - part.first_offset for part in found))
        return found

    monkeypatch.setattr(shard.dispatcher, "_read", counted)
    request = FetchRequest(
        *("two", {0: 0, 1: 0}, 1 << 20, 10, 600_000), wanted=MessageSelector("TAG", "wanted")
    )
    monkeypatch.setattr(held_fetch, "IN_VAIN_MS", 300)
    found = {part.queue_id: part.next_offset for part in shard.dispatcher.fetch(request)}
    assert found == {0: 6, 1: 6}
    assert [count for count in looks if count] == [8, 4]


def test_a_held_fetch_of_a_filter_ends_after_so_many_units_or_so_much_time(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard.put("t", 40, tag="other")
    dispatch_all(shard.store)
    monkeypatch.setattr(reader, "FILTERED_UNITS", 4)
    monkeypatch.setattr(held_fetch, "LOOKED_UNITS_MAX", 16)
    assert places(shard.fetch("t", 0, 60_000, tag="wanted")) == [(0, 16, 0)]
    monkeypatch.setattr(held_fetch, "LOOKED_UNITS_MAX", 1000)
    monkeypatch.setattr(held_fetch, "LOOKED_MS_MAX", held_fetch.LOOK_MS - 1)
    assert places(shard.fetch("t", 0, 60_000, tag="wanted")) == [(0, 4, 0)]


def test_a_look_by_sql_ends_when_its_time_is_over(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard.put("t", 3 * RECORDS_AT_ONCE, tag="other")
    dispatch_all(shard.store)
    monkeypatch.setattr(dispatcher_module, "LOOK_MS", 0)
    request = FetchRequest(
        *("t", {0: 0}, 1 << 20, 10, 0), wanted=MessageSelector("SQL92", "TAGS = 'wanted'")
    )
    assert places(shard.dispatcher.fetch(request)) == [(0, RECORDS_AT_ONCE, 0)]


@pytest.mark.parametrize("wanted", [("TAG", "||"), ("SQL92", "a ="), ("REGEX", "x")])
def test_a_wrong_filter_is_refused(shard: Shard, wanted: tuple[str, str]) -> None:
    request = FetchRequest("t", {0: 0}, 1 << 20, 10, 60_000, wanted=MessageSelector(*wanted))
    with pytest.raises(Rejected, match="filter|expression|SQL|tag"):
        shard.dispatcher.fetch(request)


def test_much_undispatched_ends_the_linger_time(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher_module, "LINGER_BYTES_MAX", 1)
    shard.dispatcher.linger_s = 60.0
    shard.start()
    shard.put("t")
    until(
        lambda: shard.store.dispatched == shard.store.log.confirmed > 0,
        lambda: threading.Event().wait(0.001),
    )


def test_readers_of_other_queues_let_units_gather(shard: Shard) -> None:
    idle = shard.begin_fetch("quick", 0, 60_000)
    until(
        lambda: ("quick", 0) in shard.dispatcher._waiting_reads,
        lambda: threading.Event().wait(0.001),
    )
    dispatch_all(shard.store)
    shard.put("t")
    assert shard.dispatcher._queues_to_wake() == set()
    dispatched = shard.store.dispatched
    shard.put("quick")
    # Without the dispatch thread: the read dispatches its message, and the one before it.
    assert idle.result(10)[0].next_offset == 1
    assert shard.store.dispatched > dispatched


def test_the_range_in_an_error_has_every_acknowledged_message(shard: Shard) -> None:
    shard.put("t", 2)
    # Not dispatched yet, and in range all the same.
    assert shard.fetch("t", 2, 0) == []
    beyond = shard.begin_fetch("t", 9, 0)
    until(
        lambda: shard.dispatcher._awaiting == 1,
        lambda: shard.thread.ident or threading.Event().wait(0.001),
    )
    shard.start()
    (part,) = beyond.result(30)
    assert isinstance(part.error, OffsetOutOfRange)
    assert (part.error.fields["min"], part.error.fields["max"]) == (0, 2)


def test_the_confirmed_end_is_awaited_however_long_the_dispatch_takes(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard.put("t", 3)
    asked = threading.Thread(target=shard.dispatcher.await_confirmed)
    asked.start()
    until(lambda: shard.dispatcher._awaiting == 1, lambda: asked.join(0.001))
    assert shard.store.queue_range("t", 0) == (0, 0)
    shard.start()
    asked.join(10)
    assert shard.store.queue_range("t", 0) == (0, 3)


def test_the_confirmed_end_that_a_power_loss_took_is_awaited_once(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard.start()
    # A mirror's leader after a power loss: the follower has not reported these yet.
    shard.store.put(PutRequest("t", 0, batch([b"x"] * 3), None, 0, 0, "quorum"))
    shard.dispatcher.expect(shard.store.log.end, is_needed=False)

    asked = threading.Thread(target=shard.dispatcher.await_confirmed)
    asked.start()
    until(lambda: shard.dispatcher._awaiting == 1, lambda: asked.join(0.001))
    confirm_only(shard.store)
    shard.dispatcher.wake()
    asked.join(10)
    assert shard.store.queue_range("t", 0) == (0, 3)

    # A follower that stays away delays only the first call.
    shard.store.put(PutRequest("t", 0, batch([b"x"]), None, 0, 0, "quorum"))
    shard.dispatcher.expect(shard.store.log.end, is_needed=False)
    monkeypatch.setattr(dispatcher_module, "CONFIRMED_WAIT_MS", 1)
    shard.dispatcher.await_confirmed()
    assert shard.dispatcher._expected_end == 0


def test_a_dispatch_that_takes_too_long_is_an_error_and_not_a_lower_end(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher_module, "CONFIRMED_WAIT_MS", 1)
    shard.put("t", 3)
    with pytest.raises(Unavailable, match="acknowledged bytes of the log"):
        shard.dispatcher.await_confirmed()


class Disk(Files):
    """A disk that refuses writes of consume queues while `refusing`."""

    refusing: OSError | None = None

    def __init__(self) -> None:
        super().__init__()
        self._queues: set[int] = set()

    def open_file(self, path: PathLike, *, create: bool = False, writable: bool = True) -> int:
        if self.refusing is not None and "consumequeue" in str(path):
            raise self.refusing
        fd = super().open_file(path, create=create, writable=writable)
        self._queues.discard(fd)
        if "consumequeue" in str(path):
            self._queues.add(fd)
        return fd

    def pwrite(self, fd: int, data: Any, offset: int) -> None:
        if self.refusing is not None and fd in self._queues:
            raise self.refusing
        super().pwrite(fd, data, offset)


@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE, errno.ENOMEM])
@pytest.mark.parametrize("first", [True, False], ids=["new queue", "old queue"])
def test_a_refused_dispatch_is_tried_again_until_the_disk_works(
    tmp_path: Path, code: int, first: bool
) -> None:
    disk = Disk()
    with closing(Shard(tmp_path / "store", disk)) as shard:
        shard.store.topics.create("t", 1, [0])
        if not first:
            shard.put("t")
            dispatch_all(shard.store)

        disk.refusing = OSError(code, "refused")
        shard.start()
        shard.put("t", 2)
        until(lambda: bool(shard.failures), lambda: shard.thread.join(0.001))
        assert "refused" in shard.failures.as_status()["dispatch"]

        disk.refusing = None
        shard.dispatcher.await_confirmed()
        assert shard.store.queue_range("t", 0)[1] == (2 if first else 3)
        until(lambda: not shard.failures, lambda: shard.thread.join(0.001))
        assert shard.store.flags.writable
        assert not shard.ended


def test_reads_leave_a_dispatch_that_fails_to_its_thread(tmp_path: Path) -> None:
    disk, pause = Disk(), threading.Event()
    with closing(Shard(tmp_path / "store", disk)) as shard:
        shard.store.topics.create("t", 1, [0])
        confirm(shard.store)
        counts = {"dispatch": 0, "fetch": 0}

        def counted(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **options: Any) -> Any:
                counts[name] += 1
                return work(*args, **options)

            return call

        for name in counts:
            setattr(shard.store, name, counted(name, getattr(shard.store, name)))

        disk.refusing = OSError(errno.EIO, "refused")
        shard.put("t")
        waiting = shard.begin_fetch("t", 0, 60_000)
        until(lambda: shard.dispatcher._failing, lambda: pause.wait(0.001))
        for _ in range(3):
            until(lambda: ("t", 0) in shard.dispatcher._waiting_reads, lambda: pause.wait(0.001))
            read = counts["fetch"]
            shard.dispatcher.wake_readers()
            until(lambda read=read: counts["fetch"] > read, lambda: pause.wait(0.001))
        assert counts["dispatch"] == 1

        disk.refusing = None
        shard.start()
        assert waiting.result(10)[0].next_offset == 1
        until(lambda: not shard.dispatcher._failing, lambda: pause.wait(0.001))


def test_an_unexpected_error_in_the_dispatch_of_a_read_ends_the_dispatch_thread(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug = Bug("half done")

    def broken(confirmed: int) -> int:
        raise bug

    monkeypatch.setattr(shard.store, "dispatch", broken)
    shard.put("t")
    waiting = shard.begin_fetch("t", 0, 60_000)
    until(lambda: shard.dispatcher._fatal_error is bug, lambda: threading.Event().wait(0.001))
    # Only the read has met it.
    monkeypatch.undo()
    shard.start()
    shard.thread.join(10)
    assert shard.ended == [bug]
    assert shard.store.dispatched < shard.store.log.confirmed

    shard.dispatcher.stop()
    with pytest.raises(Unavailable, match="stopping"):
        waiting.result(10)


def test_a_read_does_not_wait_while_another_thread_dispatches(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher_module, "FIRST_DISPATCH_WAIT_MS", 1)
    with shard.dispatcher.paused():
        shard.put("t")
        assert shard.fetch("t", 0, 1) == []
    shard.start()
    assert shard.begin_fetch("t", 0, 60_000).result(10)[0].next_offset == 1


def test_an_index_that_lags_gives_a_blocked_dispatch_nothing_to_do(tmp_path: Path) -> None:
    with closing(MessageStore.open(tmp_path)) as store:
        store.topics.create("t", 1, [0])
        confirm(store)
        dispatcher = Dispatcher(store, clock=ManualClock(), on_dispatched=lambda: None)
        keyed = batch([b"x"] * 100, properties=b"KEYS\x01k\x02")
        store.put(PutRequest("t", 0, keyed, None, 0, 0, "quorum"))
        confirm_only(store)
        assert dispatcher._step()
        assert store.reput.index_behind
        store.flags.set(LOGIC_DISK_FULL)
        assert not dispatcher._step()
        store.flags.clear(LOGIC_DISK_FULL)
        assert store.reput.index_behind


def test_a_query_waits_for_the_index_and_is_refused_while_that_cannot_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(MessageStore.open(tmp_path)) as store:
        store.topics.create("t", 1, [0])
        confirm(store)
        dispatcher = Dispatcher(store, clock=ManualClock(), on_dispatched=lambda: None)
        keyed = batch([b"x"] * 100, properties=b"KEYS\x01k\x02")
        store.put(PutRequest("t", 0, keyed, None, 0, 0, "quorum"))
        confirm_only(store)
        assert dispatcher._step()
        missing = store.dispatched - store.index.indexed
        assert missing > 0

        monkeypatch.setattr(dispatcher_module, "CONFIRMED_WAIT_MS", 20)
        with pytest.raises(Unavailable, match=f"the index lacks {missing} bytes") as refused:
            dispatcher.await_indexed()
        assert refused.value.field == "index"

        monkeypatch.setattr(dispatcher_module, "CONFIRMED_WAIT_MS", 20_000)
        running = threading.Thread(target=dispatcher.run)
        running.start()
        try:
            dispatcher.await_indexed()
            assert store.index.indexed == store.log.confirmed
        finally:
            dispatcher.stop()
            running.join()


def test_a_busy_queue_leaves_room_for_quiet_ones_in_the_same_fetch(shard: Shard) -> None:
    shard.store.topics.create("many", 4, [0])
    for queue, count in ((0, 400), (1, 1), (2, 300), (3, 2)):
        shard.put("many", count, queue)
    shard.start()
    for queue in range(4):
        until(
            lambda queue=queue: shard.store.queue_range("many", queue)[1] > 0,
            lambda: threading.Event().wait(0.001),
        )

    def counts(first: int) -> dict[int, int]:
        offsets = {(first + turn) % 4: 0 for turn in range(4)}
        found = shard.dispatcher.fetch(FetchRequest("many", offsets, 20_000, 1000, 0))
        return {part.queue_id: len(part.records) for part in found if part.records is not None}

    size = 20_000 // sum(counts(1).values())
    for first in range(4):
        found = counts(first)
        assert set(found) == {0, 1, 2, 3}
        assert (found[1], found[3]) == (1, 2)
        # The bytes that the quiet ones do not need are used.
        assert sum(found.values()) * size > 15_000 or first in (0, 2)
    assert counts(0)[0] * size > 4_000


def test_large_messages_of_others_do_not_keep_a_queue_back_for_ever(shard: Shard) -> None:
    shard.store.topics.create("many", 3, [0])
    for queue, count in ((0, 3), (1, 2), (2, 1)):
        shard.put("many", count, queue)
    shard.start()
    until(
        lambda: all(shard.store.queue_range("many", queue)[1] for queue in range(3)),
        lambda: threading.Event().wait(0.001),
    )
    # A byte is less than any message: each fetch has one queue.
    firsts = [
        shard.dispatcher.fetch(FetchRequest("many", dict.fromkeys(order, 0), 1, 10, 0))[0].queue_id
        for order in ((0, 1, 2), (1, 2, 0), (2, 0, 1))
    ]
    assert firsts == [0, 1, 2]
