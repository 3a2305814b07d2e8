"""RayMQ: a durable, replicated message log inside a Ray cluster.

    cluster = raymq.start("~/raymq-data")
    cluster.create_topic("orders", queues=4)
    with cluster.producer() as producer:
        receipt = producer.send("orders", b"hello", key=b"42").result()

Everything is loaded on first use (PEP 562): `import raymq` loads neither Ray nor Arrow, so that the
small processes of a cluster stay small and the command line quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raymq.cluster.cluster import Cluster
    from raymq.cluster.consume.async_consumer import AsyncConsumer
    from raymq.cluster.consume.consumer import Consumer
    from raymq.cluster.messages.message import Message, Receipt
    from raymq.cluster.produce.async_producer import AsyncProducer
    from raymq.cluster.produce.producer import Producer
    from raymq.cluster.queue.durable_queue import Queue
    from raymq.cluster.start import connect, start
    from raymq.store import errors

__version__ = "0.1.0"

__all__ = [
    "AsyncConsumer",
    "AsyncProducer",
    "Cluster",
    "Consumer",
    "Message",
    "Producer",
    "Queue",
    "Receipt",
    "__version__",
    "connect",
    "errors",
    "start",
]

_HOMES = {
    "AsyncConsumer": "raymq.cluster.consume.async_consumer",
    "AsyncProducer": "raymq.cluster.produce.async_producer",
    "Cluster": "raymq.cluster.cluster",
    "Consumer": "raymq.cluster.consume.consumer",
    "Message": "raymq.cluster.messages.message",
    "Producer": "raymq.cluster.produce.producer",
    "Queue": "raymq.cluster.queue.durable_queue",
    "Receipt": "raymq.cluster.messages.message",
    "connect": "raymq.cluster.start",
    "start": "raymq.cluster.start",
}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("raymq.store.errors")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'raymq' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    # Looked up once: the next access does not come here.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
