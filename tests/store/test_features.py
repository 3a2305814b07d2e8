"""The level of features in a log: an older version does not open what it would lose."""

from __future__ import annotations

from pathlib import Path

import pytest

from raymq.store.base.errors import Rejected
from raymq.store.config.store_config import StoreConfig
from raymq.store.engine.message_store import MessageStore
from raymq.store.put.inner_message import ServiceProgress
from raymq.store.state.features import FEATURES, KNOWN_LEVEL, LEVEL, feature_level
from tests.support.batches import request
from tests.support.clock import ManualClock
from tests.support.confirming import confirm
from tests.support.simulated_disk import SimulatedDisk

ROOT = Path("/s")
CONFIG = StoreConfig(segment_size_bytes=16 * 1024, consume_queue_file_size_bytes=400)


def open_store(disk: SimulatedDisk) -> MessageStore:
    return MessageStore.open(ROOT, config=CONFIG, files=disk, clock=ManualClock())


def write_with_level(disk: SimulatedDisk, level: int) -> None:
    store = open_store(disk)
    store.topics.create("t", 1, [0])
    store.put_inner([], progress=ServiceProgress(FEATURES, {LEVEL: level}))
    for _ in range(40):
        # Over several files: the level comes again with each snapshot.
        store.put(request([b"x" * 1000]))
    confirm(store)
    assert feature_level(store.state.progress) == level
    store.close()


def test_a_log_of_a_newer_level_is_not_opened() -> None:
    disk = SimulatedDisk()
    write_with_level(disk, KNOWN_LEVEL + 1)
    for _ in range(2):
        with pytest.raises(
            Rejected, match=f"level {KNOWN_LEVEL + 1}.* knows {KNOWN_LEVEL}"
        ) as raised:
            open_store(disk)
        assert raised.value.fields["found"] == KNOWN_LEVEL + 1


def test_a_log_of_a_known_level_is_opened() -> None:
    disk = SimulatedDisk()
    write_with_level(disk, KNOWN_LEVEL)
    store = open_store(disk)
    assert feature_level(store.state.progress) == KNOWN_LEVEL
    store.close()


def test_a_log_without_such_features_has_level_0() -> None:
    assert feature_level({}) == 0
