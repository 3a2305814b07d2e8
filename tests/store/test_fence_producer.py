"""A producer is fenced before it puts anything, and stays so in the log."""

from __future__ import annotations

from pathlib import Path

import pytest

from raymq.store.base.errors import Fenced
from raymq.store.config.store_config import StoreConfig
from raymq.store.embedded.embedded_store import EmbeddedStore
from tests.support.batches import request

CONFIG = StoreConfig(segment_size_bytes=256 * 1024, prewrite_window_bytes=64 * 1024)


def test_puts_of_a_lower_epoch_are_refused_also_after_a_restart(tmp_path: Path) -> None:
    store = EmbeddedStore(tmp_path, config=CONFIG)
    store.create_topic("t", 1)
    store.put(request([b"a"], producer_id=7, sequence=0))
    assert store.store.inner_put.fence_producer(7, 3) is not None
    for _ in range(2):
        with pytest.raises(Fenced, match="has epoch 3; epoch 0 is fenced"):
            store.put(request([b"b"], producer_id=7, sequence=1))
        with pytest.raises(Fenced, match="has epoch 3; epoch 2 is fenced"):
            store.store.inner_put.fence_producer(7, 2)
        store.close()
        store = EmbeddedStore(tmp_path, config=CONFIG)
    store.put(request([b"b"], producer_id=7, sequence=1, epoch=3))
    store.close()


def test_a_fence_that_is_there_and_one_that_fences_nothing_store_nothing(tmp_path: Path) -> None:
    store = EmbeddedStore(tmp_path, config=CONFIG)
    store.create_topic("t", 1)
    store.store.inner_put.fence_producer(7, 3)
    end = store.store.log.end
    assert store.store.inner_put.fence_producer(7, 3) is None
    assert store.store.inner_put.fence_producer(8, 0) is None
    assert store.store.log.end == end
    store.close()
