"""The receipt of a message with WAIT=false comes after the append: neither the flush nor a replica is waited for.

Source: CommitLog#handleDiskFlushAndHA, RocketMQ 5.3.3, which asks isWaitStoreMsgOK.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from raymq.client.messages.message import Message
from raymq.store.base.errors import DeliveryUnknown
from tests.support.served_shard import HASTY, ServedShard


@pytest.fixture(params=[False, True], ids=["no flush", "no flush and no follower"])
def shard(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ServedShard]:
    """A shard with topic t that syncs nothing, and that perhaps waits for a follower that is away."""
    with ServedShard(tmp_path / "shard", HASTY) as plain:
        plain.start_flusher()
        plain.cluster.create_topic("t", queues=1)
    with ServedShard(tmp_path / "shard", HASTY, mirror=request.param) as served:
        yield served


def test_the_receipt_comes_after_the_append_and_a_plain_one_does_not_come(
    shard: ServedShard,
) -> None:
    # A plain message is sent again and again until this time is over.
    with shard.cluster.producer(delivery_timeout_ms=600) as producer:
        appended = shard.host.parts.log.end
        receipt = producer.send("t", b"early", wait_store_ok=False).result(10)
        assert (receipt.queue_id, receipt.offset) == (0, 0)
        assert shard.host.parts.log.end > appended
        assert shard.host.parts.log.synced <= appended
        early = producer.send(Message(topic="t", body=b"early too", wait_store_ok=False))
        assert early.result(10).offset == 1
        with pytest.raises(DeliveryUnknown):
            producer.send("t", b"plain").result(10)


def test_so_it_is_with_asyncio(shard: ServedShard) -> None:
    async def send() -> int:
        async with shard.cluster.async_producer() as producer:
            return (await producer.send("t", b"early", wait_store_ok=False)).offset

    assert asyncio.run(send()) == 0


def test_a_batch_with_one_plain_message_waits_for_all(shard: ServedShard) -> None:
    both = [
        Message(topic="t", body=b"early", wait_store_ok=False),
        Message(topic="t", body=b"plain"),
    ]
    # A plain message is sent again and again until this time is over.
    with shard.cluster.producer(delivery_timeout_ms=600) as producer:
        for sent in producer.send_many(both):
            with pytest.raises(DeliveryUnknown):
                sent.result(10)
