"""Single messages that do not wait for each other: gathered, answered one by one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from raymq.store.base.errors import Rejected, Unavailable
from raymq.store.base.failpoints import failpoint
from raymq.store.config.store_config import StoreConfig
from raymq.store.embedded.async_put import AsyncPut
from raymq.store.embedded.embedded_store import EmbeddedStore
from raymq.store.services.stored_message import read


@pytest.fixture(params=["sync", "async"])
def store(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[EmbeddedStore]:
    config = StoreConfig(
        segment_size_bytes=1 << 20,
        consume_queue_file_size_bytes=2000,
        max_message_bytes=5000,
        flush=request.param,
    )
    opened = EmbeddedStore(tmp_path, config=config)
    opened.create_topic("t", 2)
    yield opened
    opened.close()


@pytest.fixture
def puts(store: EmbeddedStore) -> Iterator[AsyncPut]:
    made = store.async_put()
    yield made
    made.close()


def bodies(store: EmbeddedStore, queue_id: int) -> list[bytes]:
    store.fetch("t", queue_id, 0)
    found: list[bytes] = []
    at, (_, end) = 0, store.store.queue_range("t", queue_id)
    while at < end:
        part, at = read(store.store, "t", queue_id, at, max_records=1000)
        found += [message.body for message in part]
    return found


def test_every_message_is_stored_in_order_and_gets_its_offset(
    store: EmbeddedStore, puts: AsyncPut
) -> None:
    sent = [puts.put("t", number % 2, b"%d" % number, tag="x") for number in range(3000)]
    assert [each.result(20) for each in sent] == [number // 2 for number in range(3000)]
    for queue_id in (0, 1):
        assert bodies(store, queue_id) == [b"%d" % number for number in range(queue_id, 3000, 2)]


def test_messages_gather_while_an_append_is_under_way(store: EmbeddedStore, puts: AsyncPut) -> None:
    begun, go_on = threading.Event(), threading.Event()
    appends = []

    def hold() -> None:
        appends.append(1)
        begun.set()
        go_on.wait(20)

    with failpoint("log.before_store", hold):
        first = puts.put("t", 0, b"first")
        assert begun.wait(20)
        others = [puts.put("t", 0, b"%d" % number) for number in range(500)]
        assert not first.done()
        go_on.set()
        assert [each.result(20) for each in others] == list(range(1, 501))
    assert len(appends) == 2


def test_one_that_is_refused_takes_no_other_with_it(store: EmbeddedStore, puts: AsyncPut) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        go_on.wait(20)

    with failpoint("log.before_store", hold):
        puts.put("t", 1, b"holds the others up")
        assert begun.wait(20)
        sent = [puts.put("t", 0, b"x" * size) for size in (10, 9000, 20)]
        go_on.set()
        assert (sent[0].result(20), sent[2].result(20)) == (0, 1)
    with pytest.raises(Rejected):
        sent[1].result(20)
    assert [len(body) for body in bodies(store, 0)] == [10, 20]


def test_queued_messages_are_stored_at_close_and_later_ones_refused(
    store: EmbeddedStore,
) -> None:
    made = store.async_put()
    sent = [made.put("t", 0, b"x") for _ in range(100)]
    made.close()
    assert [each.result(0) for each in sent] == list(range(100))
    with pytest.raises(Unavailable, match="closed"):
        made.put("t", 0, b"x")


def test_each_put_to_an_unknown_topic_is_refused(store: EmbeddedStore, puts: AsyncPut) -> None:
    for each in [puts.put("nope", 0, b"x") for _ in range(3)]:
        with pytest.raises(Rejected, match="nope"):
            each.result(20)


def test_a_value_that_is_none_of_its_column_is_refused_alone(
    store: EmbeddedStore, puts: AsyncPut
) -> None:
    sent = [
        puts.put("t", 0, b"good"),
        puts.put("t", 0, b"bad", tag="\ud800"),
        puts.put("t", 0, b"good", tag=5),  # type: ignore[arg-type]
        puts.put("t", 0, "a text"),  # type: ignore[arg-type]
        puts.put("t", 0, b"good, too"),
    ]
    for each in sent[1:4]:
        with pytest.raises(Rejected, match="cannot be stored as it is"):
            each.result(20)
    assert (sent[0].result(20), sent[4].result(20)) == (0, 1)
    assert puts.put("t", 0, b"next").result(20) == 2
