"""What readers of a shard get: reads that wait for something to be there."""

from __future__ import annotations

import struct
import threading
from contextlib import closing
from pathlib import Path

import pytest

from raymq.actors import dispatcher as dispatcher_module
from raymq.actors.dispatcher import Dispatcher
from raymq.store.embedded import EmbeddedStore
from raymq.store.message_store import MessageStore
from raymq.store.queues.consume_queue import BLANK_SIZE
from raymq.store.requests import FetchRequest, PutRequest
from tests.support.batches import batch
from tests.support.clock import ManualClock
from tests.support.confirming import confirm, dispatch_all
from tests.support.waiting import until


def test_a_read_goes_on_behind_the_units_of_a_foreign_store_that_point_at_nothing(
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
        # Fewer at once than the gap is wide; nothing is there to wait for.
        (part,) = dispatcher.fetch(FetchRequest("t", {0: 2}, 1 << 20, 2, 0))
        assert part.records is not None
        assert (part.first_offset, part.next_offset, len(part.records)) == (2, 8, 1)


def test_a_read_waits_for_the_dispatch_only_where_its_queue_has_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher_module, "DISPATCH_WAIT_MS", 0)
    with closing(MessageStore.open(tmp_path)) as store:
        store.create_topic("t", 2, [0])
        store.put(PutRequest("t", 1, batch([b"first"]), None, 0, 0, "quorum"))
        confirm(store)
        store.put(PutRequest("t", 0, batch([b"second"]), None, 0, 0, "quorum"))
        store.log.sync()
        store.log.note_confirmed(store.log.end)
        # Time does not pass: a read that waits comes back when it is told to look, no sooner.
        dispatcher = Dispatcher(store, clock=ManualClock(), on_dispatched=lambda: None)
        assert dispatcher.fetch(FetchRequest("t", {1: 1}, 1 << 20, 10, 0)) == []
        found: list[int] = []

        def read() -> None:
            parts = dispatcher.fetch(FetchRequest("t", {0: 0, 1: 1}, 1 << 20, 10, 0))
            found.extend(part.next_offset for part in parts)

        reader = threading.Thread(target=read)
        reader.start()
        until(lambda: dispatcher._readers == 1, lambda: reader.join(0.001))
        dispatch_all(store)
        dispatcher.tell_readers()
        reader.join()
        assert found == [1]
