"""Apache Kafka as `benchmarks.compare` drives it: by confluent-kafka, the Python client on librdkafka."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import kafka
from benchmarks.compared import (
    BACKLOG,
    BATCH_ROWS,
    MESSAGE,
    ONE,
    Client,
    Found,
    produced,
    read,
    threads,
)

#: One caller that waits gains nothing by librdkafka's own 5 ms. Of many, they make a batch, which is synced once
AT_ONCE, TOGETHER = {"linger.ms": 0}, {"linger.ms": 5}
LINGERING = {"linger.ms": 5, "batch.size": 1_000_000, "delivery.report.only.error": True}
TIMEOUT_S = 30.0


def is_installed() -> bool:
    """Whether Java, Maven and the client are there."""
    has_client = importlib.util.find_spec("confluent_kafka") is not None
    return has_client and all(map(shutil.which, ("java", "mvn")))


@contextlib.contextmanager
def kafka_client(directory: Path, durable: bool) -> Iterator[Client]:
    """A broker of its own. `durable`: the broker syncs each batch before it acknowledges."""
    with kafka.broker(directory / "kafka") as broker:
        address = {"bootstrap.servers": broker.address}
        _create_topics(address, {"flush.messages": "1"} if durable else {})
        yield Client(
            threads=partial(_waiting, address),
            producers={"produce_msg_s": partial(_produce, address)},
            readers={"read_msg_s": partial(_read, address)},
        )


class Failed(Exception):
    """Kafka did not store a message."""


def _check(error: Any, _message: Any = None) -> None:
    if error is not None:
        raise Failed(error)


def _create_topics(address: dict[str, Any], config: dict[str, str]) -> None:
    from confluent_kafka.admin import AdminClient
    from confluent_kafka.cimpl import NewTopic

    topics = [NewTopic(topic, 1, 1, config=config) for topic in (ONE, BACKLOG)]
    admin = AdminClient(address)
    for created in admin.create_topics(topics).values():
        created.result(TIMEOUT_S)


def _waiting(address: dict[str, Any], count: int, seconds: float) -> Found:
    """All threads share a producer, as its documentation says. One thread alone waits in `poll` itself."""
    from confluent_kafka import Producer

    producer, ended = (
        Producer({**address, **(AT_ONCE if count == 1 else TOGETHER)}),
        threading.Event(),
    )

    def alone() -> Callable[[], None]:
        def send() -> None:
            done: list[Any] = []
            producer.produce(ONE, MESSAGE, on_delivery=lambda *found: done.append(found))
            while not done:
                producer.poll(1)
            _check(*done[0])

        return send

    def beside_others() -> Callable[[], None]:
        done = threading.Semaphore(0)
        found: list[Any] = []

        def delivered(*result: Any) -> None:
            found[:] = result
            done.release()

        def send() -> None:
            producer.produce(ONE, MESSAGE, on_delivery=delivered)
            done.acquire()
            _check(*found)

        return send

    def poll() -> None:
        while not ended.is_set():
            producer.poll(0.1)

    if count == 1:
        return threads(alone, count, seconds)
    poller = threading.Thread(target=poll)
    poller.start()
    try:
        return threads(beside_others, count, seconds)
    finally:
        ended.set()
        poller.join()


def _produce(address: dict[str, Any], seconds: float) -> tuple[int, float]:
    from confluent_kafka import Producer

    producer = Producer({**address, **LINGERING})

    def send() -> int:
        while True:
            try:
                producer.produce(BACKLOG, MESSAGE, on_delivery=_check)
            except BufferError:
                producer.poll(0.01)
            else:
                return 1

    return produced(send, partial(producer.flush, TIMEOUT_S), seconds)


def _read(address: dict[str, Any], messages: int) -> float:
    from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

    consumer = Consumer({**address, "group.id": "bench", "enable.auto.commit": False})
    consumer.assign([TopicPartition(BACKLOG, 0, OFFSET_BEGINNING)])

    def poll() -> int:
        found = consumer.consume(BATCH_ROWS, TIMEOUT_S)
        for message in found:
            _check(message.error())
            len(message.value())
        return len(found)

    try:
        return read(poll, messages)
    finally:
        consumer.close()
