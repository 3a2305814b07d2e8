"""RayMQ: a durable, replicated message log inside a Ray cluster.

Example:
    ```python
    import raymq

    with raymq.start("raymq-data") as cluster:
        cluster.create_topic("orders", queues=4)
        with cluster.producer() as producer:
            receipt = producer.send("orders", b"hello", key=b"42").result(timeout=30)
        print(receipt.queue_id, receipt.offset)
    ```

Programs import these names, and the names in `raymq.data`, `raymq.errors`, `raymq.serve`, `raymq.spark`, `raymq.store`
and `raymq.trace`. Every name is loaded on first use. So `import raymq` loads neither Ray nor Arrow: the small processes
of a cluster stay small, and the command line quick.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raymq._lazy import lazy_names

if TYPE_CHECKING:
    from raymq import errors
    from raymq.client.consume.async_consumer import AsyncConsumer
    from raymq.client.consume.consumer import Consumer
    from raymq.client.consume.wanted_topics import matching
    from raymq.client.messages.message import Message, Receipt
    from raymq.client.produce.async_producer import AsyncProducer
    from raymq.client.produce.producer import Producer
    from raymq.client.times import at_ms
    from raymq.client.workers.async_workers import AsyncWorkers
    from raymq.client.workers.workers import Workers
    from raymq.cluster.cluster import Cluster
    from raymq.cluster.connect import connect
    from raymq.cluster.queue.durable_queue import Queue
    from raymq.cluster.start import start

__version__ = "0.1.0"

__all__ = [
    "AsyncConsumer",
    "AsyncProducer",
    "AsyncWorkers",
    "Cluster",
    "Consumer",
    "Message",
    "Producer",
    "Queue",
    "Receipt",
    "Workers",
    "__version__",
    "at_ms",
    "connect",
    "errors",
    "matching",
    "start",
]

__getattr__ = lazy_names(
    __name__,
    {
        "AsyncConsumer": "raymq.client.consume.async_consumer",
        "AsyncProducer": "raymq.client.produce.async_producer",
        "AsyncWorkers": "raymq.client.workers.async_workers",
        "Cluster": "raymq.cluster.cluster",
        "Consumer": "raymq.client.consume.consumer",
        "Message": "raymq.client.messages.message",
        "Producer": "raymq.client.produce.producer",
        "Queue": "raymq.cluster.queue.durable_queue",
        "Receipt": "raymq.client.messages.message",
        "Workers": "raymq.client.workers.workers",
        "at_ms": "raymq.client.times",
        "connect": "raymq.cluster.connect",
        "errors": "raymq.errors:",
        "matching": "raymq.client.consume.wanted_topics",
        "start": "raymq.cluster.start",
    },
)


def __dir__() -> list[str]:
    return sorted(__all__)
