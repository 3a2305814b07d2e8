"""What records say of the hosts they come from: the address that serves the shard, and that of the producer."""

from __future__ import annotations

from pathlib import Path

from raymq.store.base.format import offset_message_id
from raymq.store.records.record_decode import decode_column
from raymq.store.records.requests import FetchRequest
from tests.support.served_shard import ServedShard


def test_a_record_names_the_address_of_its_shard_and_that_of_its_producer(tmp_path: Path) -> None:
    with ServedShard(tmp_path) as shard:
        shard.start_flusher()
        shard.cluster.create_topic("t", queues=1)
        with shard.cluster.producer() as producer:
            producer.send("t", b"body").result(30)
        with shard.cluster.consumer("t", start="earliest") as consumer:
            (message,) = consumer.poll(timeout=30)
        (found,) = shard.host.fetch(FetchRequest("t", {0: 0}, 1 << 20, 10, 0))
        (row,) = decode_column(found.records).to_pylist()
        served = shard.endpoints[0]
        ip, _, port = served.rpartition(":")

    assert row["store_host"] == served
    assert message.message_id == offset_message_id(ip, int(port), row["physical_offset"])
    born_ip, _, born_port = row["born_host"].rpartition(":")
    assert born_ip == "127.0.0.1"
    # Ephemeral, and another socket than the shard's.
    assert int(born_port) not in (0, int(port))
