"""What readers of a shard get: reads that wait for something to be there."""

from __future__ import annotations

import struct
from contextlib import closing
from pathlib import Path

from raymq.actors.dispatcher import Dispatcher
from raymq.store.embedded import EmbeddedStore
from raymq.store.queues.consume_queue import BLANK_SIZE
from raymq.store.requests import FetchRequest, PutRequest
from tests.support.batches import batch
from tests.support.clock import ManualClock


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
