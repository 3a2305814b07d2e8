"""The behaviour of an embedded store when one of its threads ends, or its constructor fails."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from raymq.store.base.errors import DeliveryUnknown, Unavailable
from raymq.store.config.store_config import StoreConfig
from raymq.store.embedded import embedded_store as embedded
from raymq.store.embedded.embedded_store import EmbeddedStore
from raymq.store.log.flush import FlushRealTime, GroupCommit
from raymq.store.log.segments.read_ahead import ReadAhead
from raymq.store.put.inner_message import InnerMessage
from tests.support.batches import request
from tests.support.waiting import until

SMALL = StoreConfig(segment_size_bytes=64 * 1024, prewrite_window_bytes=4096)
ASYNC = StoreConfig(segment_size_bytes=64 * 1024, flush="async", flush_interval_ms=10)

CALLS = {
    "append": lambda store: store.append(request([b"x"])),
    "put_message": lambda store: store.put_message(InnerMessage("t", 0, b"x")),
    "put_messages": lambda store: store.put_messages([InnerMessage("t", 0, b"x")]),
    "create_topic": lambda store: store.create_topic("other", 1),
    "fetch": lambda store: store.fetch("t", 0, 0),
    "prepare": lambda store: store.prepare(InnerMessage("t", 0, b"x")),
    "commit": lambda store: store.commit(0),
    "rollback": lambda store: store.rollback(0),
    "deliver_due": lambda store: store.deliver_due(),
    "close": lambda store: store.close(),
}


def opened(path, config) -> EmbeddedStore:
    store = EmbeddedStore(path, config=config)
    store.create_topic("t", 1)
    store.put(request([b"kept"]))
    return store


def end_flush_thread(store, monkeypatch) -> None:
    """An exception that nothing expects ends the flush thread."""

    def fail(*_, **__):
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr(GroupCommit, "flush", fail)
    monkeypatch.setattr(FlushRealTime, "flush_if_due", fail)
    store._wake.set()
    store._threads[0].join(10)
    assert not store._threads[0].is_alive()


@pytest.mark.parametrize("config", [SMALL, ASYNC], ids=["sync", "async"])
@pytest.mark.parametrize("call", CALLS)
def test_an_exception_of_the_flush_thread_is_raised_by_the_next_call(
    tmp_path, monkeypatch, config, call
):
    store = opened(tmp_path, config)
    end_flush_thread(store, monkeypatch)
    with pytest.raises(Unavailable, match="a mistake") as caught:
        CALLS[call](store)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    # It was said once: the store closes, and what was stored is there.
    store.close()
    monkeypatch.undo()
    again = EmbeddedStore(tmp_path, config=config)
    assert again.fetch("t", 0, 0).next_offset == 1
    again.close()


def test_a_put_that_waits_when_the_flush_thread_ends_is_unknown_at_once(tmp_path, monkeypatch):
    store = opened(
        tmp_path, StoreConfig(segment_size_bytes=64 * 1024, sync_flush_timeout_ms=60_000)
    )
    failing = threading.Event()

    def fail(*_):
        failing.wait(10)
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr(GroupCommit, "flush", fail)
    appended = store.append(request([b"x"]))
    reported = []

    def wait() -> None:
        with pytest.raises(DeliveryUnknown, match="a mistake"):
            store.wait(appended)
        reported.append(True)

    waiting = threading.Thread(target=wait)
    waiting.start()
    failing.set()
    waiting.join(10)
    assert reported == [True]
    store.abandon()


def test_an_exception_of_the_thread_that_works_ahead_is_raised_by_the_next_call(
    tmp_path, monkeypatch
):
    def fail(*_):
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr(ReadAhead, "run", fail)
    store = EmbeddedStore(tmp_path, config=SMALL)
    store._threads[1].join(10)
    with pytest.raises(Unavailable, match="a mistake"):
        store.append(request([b"x"]))
    store.close()


class Broken(Exception):
    """The error of a step of the constructor."""


def raising(*_, **__):
    raise Broken


class NoThread(threading.Thread):
    """The second thread cannot be started."""

    def start(self) -> None:
        if self.name == "raymq-ahead":
            raise Broken
        super().start()


@pytest.mark.parametrize(
    "step", ["sync", "DelayService", "MessagePut", "thread", "_advance", "MessageStore"]
)
def test_a_constructor_that_fails_lets_go_of_the_lock_and_the_threads(tmp_path, monkeypatch, step):
    before = set(threading.enumerate())
    with monkeypatch.context() as patch:
        if step == "sync":
            patch.setattr("raymq.store.log.commit_log.CommitLog.sync", raising)
        elif step == "thread":
            patch.setattr("threading.Thread", NoThread)
        elif step == "_advance":
            patch.setattr(EmbeddedStore, "_advance", raising)
        elif step == "MessageStore":
            patch.setattr("raymq.store.engine.message_store.IndexService", raising)
        else:
            patch.setattr(embedded, step, raising)
        with pytest.raises(Broken):
            EmbeddedStore(tmp_path, config=SMALL)
    assert set(threading.enumerate()) <= before
    opened(tmp_path, SMALL).close()


def test_a_put_is_flushed_without_waiting_for_the_interval_if_flushes_are_not_timed(tmp_path):
    untimed = replace(
        ASYNC, flush_interval_ms=3_600_000, flush_least_pages=0, flush_commit_log_timed=False
    )
    store = opened(tmp_path, untimed)
    until(lambda: store.ends.synced == store.ends.appended, lambda: threading.Event().wait(0.01))
    store.close()
