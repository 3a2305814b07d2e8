"""StoreStats: what is counted, the latency buckets, rates over sliding times."""

from __future__ import annotations

from pathlib import Path

import pytest

from raymq.store.base.errors import Rejected
from raymq.store.config.store_config import StoreConfig
from raymq.store.engine.message_store import MessageStore
from raymq.store.put.stats import BUCKET_NAMES, BUCKETS, StoreStats, bucket_of
from tests.support.batches import request
from tests.support.clock import ManualClock
from tests.support.simulated_disk import SimulatedDisk


@pytest.mark.parametrize(
    ("took_ms", "name"),
    [
        (-1, "<=0ms"),
        (0, "<=0ms"),
        (1, "0-10ms"),
        (9, "0-10ms"),
        (10, "10-50ms"),
        (99, "50-100ms"),
        (100, "100-200ms"),
        (499, "200-500ms"),
        (500, "500ms-1s"),
        (1_999, "1-2s"),
        (2_000, "2-3s"),
        (3_000, "3-4s"),
        (4_999, "4-5s"),
        (9_999, "5-10s"),
        (10_000, ">10s"),
    ],
)
def test_a_put_falls_into_rocketmqs_bucket(took_ms: int, name: str) -> None:
    assert BUCKETS == len(BUCKET_NAMES) == 13
    assert BUCKET_NAMES[bucket_of(took_ms)] == name


def test_rates_are_over_the_last_seconds_that_were_sampled() -> None:
    stats = StoreStats()
    assert stats.rates(10) is None
    for second in range(700):
        stats.sample(1000 * second)
        stats.sample(1000 * second + 500)
        stats.note_put("t", 5 if second < 640 else 20, 100, 0)
    short, middle, long = (stats.rates(seconds) for seconds in (10, 60, 600))
    assert short is not None
    assert middle is not None
    assert long is not None
    assert (short.duration_ms, middle.duration_ms, long.duration_ms) == (10_000, 60_000, 600_000)
    assert short.puts == 20
    assert middle.puts == 20
    assert long.puts == round((540 * 5 + 60 * 20 - 15) / 600)


def test_a_store_counts_puts_reads_and_refusals() -> None:
    store = MessageStore.open(
        Path("/s"),
        config=StoreConfig(segment_size_bytes=64 * 1024),
        files=SimulatedDisk(record=False),
        clock=ManualClock(),
    )
    store.topics.create("t", 2, [0])
    start = store.log.end
    store.put(request([b"x"] * 3))
    store.put(request([b"y"], queue=1))
    size = store.log.end - start
    with pytest.raises(Rejected):
        store.put(request([b"y"], queue=2))
    with pytest.raises(Rejected):
        store.put(request([b"y"], producer_id=1, sequence=7))
    store.log.sync()
    store.log.note_confirmed(store.log.end)
    store.dispatch(store.log.confirmed)
    store.fetch("t", 0, 0, max_bytes=1000, max_records=2)
    store.fetch("t", 0, 3, max_bytes=1000, max_records=2)
    stats = store.stats
    assert (stats.puts, stats.put_failed) == (4, 2)
    assert stats.put_buckets[0] == 2
    assert (stats.get_found, stats.get_missed, stats.get_transferred) == (1, 1, 2)
    shown = stats.as_status()
    assert shown["topics"] == {"t": {"messages": 4, "bytes": size}}
    assert shown["put_time"]["<=0ms"] == 2
