"""A member whose filter never matches: the group's offset moves over what it looked at, with each call."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from raymq.actors.api.held_fetch import LOOKED_UNITS_MAX
from raymq.store.config.store_config import StoreConfig
from raymq.store.records.requests import FetchRequest, MessageSelector
from tests.support import tier
from tests.support.batches import request
from tests.support.served_shard import ServedShard

BATCH = 10_000
#: the nox session `groups` has ten million
MESSAGES = tier.rounds("RAYMQ_FILTERED_MESSAGES", thorough=200_000, quick=200_000)
CONFIG = StoreConfig(segment_size_bytes=64 << 20, sync_flush_timeout_ms=60_000)


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedShard]:
    with ServedShard(tmp_path_factory.mktemp("shard"), CONFIG) as served:
        served.start_flusher()
        served.cluster.create_topic("orders", queues=1)
        for _ in range(MESSAGES // BATCH):
            (ticket,) = served.host.put([request([b"x"] * BATCH, topic="orders", tag="new")])
            ticket.wait(60)
        yield served


@pytest.mark.timeout(3_600)
@pytest.mark.parametrize(("kind", "expression"), [("TAG", "paid"), ("SQL92", "price > 5")])
def test_each_fetch_moves_on_and_looks_at_few(
    shard: ServedShard, kind: str, expression: str
) -> None:
    wanted, at, fetches = MessageSelector(kind, expression), 0, 0
    while at < MESSAGES:
        asked = FetchRequest("orders", {0: at}, 4 << 20, 10_000, 0, wanted=wanted)
        (found,) = shard.host.fetch(asked)
        assert not found.records
        assert at < found.next_offset <= at + LOOKED_UNITS_MAX
        at, fetches = found.next_offset, fetches + 1
    assert fetches >= MESSAGES // LOOKED_UNITS_MAX


@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("options", [{"tags": "paid"}, {"sql": "price > 5"}])
def test_the_offset_of_the_group_moves_although_no_message_matches(
    shard: ServedShard, options: dict[str, str]
) -> None:
    group = next(iter(options))
    with shard.cluster.consumer("orders", group=group, start="earliest", **options) as consumer:
        committed = [0]
        while committed[-1] < MESSAGES:
            assert consumer.poll(10, 0.02) == []
            consumer.commit()
            committed.append(consumer.committed().get(0, 0))
    assert committed == sorted(committed)
    # The next member goes on there, and not from the start.
    with shard.cluster.consumer("orders", group=group, start="earliest", **options) as consumer:
        assert consumer.position(0) == MESSAGES
