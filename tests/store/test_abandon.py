"""Letting go of a store as a crash would."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from raymq.store.base.errors import Corrupt
from raymq.store.base.files import Files
from raymq.store.engine.message_store import MessageStore
from raymq.store.log.control_files.marks import Marks
from raymq.store.records.requests import PutRequest
from tests.support.batches import batch


def test_an_abandoned_store_has_synced_and_noted_nothing(tmp_path: Path) -> None:
    store = MessageStore.open(tmp_path)
    store.topics.create("t", 1, [0])
    store.log.sync()
    synced = store.log.synced
    store.put(PutRequest("t", 0, batch([b"not synced"]), None, 0, 0, "quorum"))
    end = store.log.end
    assert synced < end
    store.abandon()
    marks = Marks.open(tmp_path / "raymq" / "marks", files=Files())
    assert marks.synced_end == synced
    marks.close()
    again = MessageStore.open(tmp_path)
    # The bytes are in the page cache. No sync ever proved that they are on disk.
    assert (again.log.end, again.log.crashed) == (end, True)
    again.close()


def test_a_refused_start_leaves_no_descriptor_open(tmp_path: Path) -> None:
    store = MessageStore.open(tmp_path)
    store.log.health.poison("a sync failed")
    store.abandon()
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(Corrupt, match="poisoned"):
            MessageStore.open(tmp_path)
        assert len(os.listdir("/proc/self/fd")) == descriptors
    assert Files().exists(tmp_path / "abort")
