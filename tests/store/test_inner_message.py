"""Messages that the store itself puts: any field, any queue, and several as one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from raymq.store.base.errors import Rejected
from raymq.store.base.files import Data, Files
from raymq.store.config.store_config import StoreConfig
from raymq.store.engine.message_store import MessageStore
from raymq.store.put.inner_message import InnerMessage, ServiceProgress
from raymq.store.records import record
from raymq.store.state.shard_state import INTERNAL_TOPIC
from raymq.store.tools.inspect import dump, verify
from tests.support.batches import request
from tests.support.clock import ManualClock
from tests.support.confirming import confirm

CONFIG = StoreConfig(segment_size_bytes=64 * 1024, consume_queue_file_size_bytes=2000)
BUNDLE = [
    InnerMessage("a", 1, b"first", {"TAGS": "x"}, born_time_ms=5, reconsume_times=2),
    InnerMessage("b", 0, b"second" * 50, {"KEYS": "k1 k2"}, born_host=("2001:db8::1", 7)),
    InnerMessage(
        "a", 1, b"third", {"TAGS": "y"}, flag=9, prepared_transaction_offset=77, sys_flag=0x8
    ),
]
PROGRESS = ServiceProgress("service", {"3": 17, "4": [1, "two"]})


class Killed(BaseException):
    """The process ends here."""


class Interrupted(Files):
    """The next write of more than `least` bytes stops after `keep` bytes, and with it the process."""

    def __init__(self) -> None:
        super().__init__()
        self.keep: int | None = None

    def pwrite(self, fd: int, data: Data, offset: int) -> None:
        if self.keep is None:
            super().pwrite(fd, data, offset)
            return
        super().pwrite(fd, memoryview(data)[: self.keep], offset)
        raise Killed


def open_store(root: Path, files: Files | None = None) -> MessageStore:
    return MessageStore.open(root, config=CONFIG, files=files, clock=ManualClock())


def messages(root: Path) -> list[dict[str, object]]:
    return [
        item for item in dump(root) if item["kind"] == "msg" and item["topic"] != INTERNAL_TOPIC
    ]


def read(store: MessageStore, topic: str, queue_id: int) -> list[bytes]:
    found = store.fetch(topic, queue_id, 0, max_bytes=1 << 20, max_records=100).records
    assert found is not None
    return [
        record.decode(raw, np.array([0]), np.array([len(raw)])).column("body")[0].as_py()
        for raw in found.to_pylist()
    ]


def test_every_field_of_a_bundle_is_stored_and_each_queue_counts_its_own(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    appended = store.put_inner(BUNDLE, progress=PROGRESS)
    assert [rows.first_offset for rows in appended] == [0, 0, 1]
    assert {rows.end_offset for rows in appended} == {store.log.end}
    confirm(store)
    assert read(store, "a", 1) == [b"first", b"third"]
    assert read(store, "b", 0) == [b"second" * 50]
    store.close()
    first, second, third = sorted(messages(tmp_path), key=lambda each: int(str(each["phy"])))
    assert (first["reconsume"], first["tags"]) == (2, "x")
    assert second["bornHost"] == "/[2001:db8:0:0:0:0:0:1]:7"
    assert (third["flag"], third["prepared"]) == (9, 77)
    assert verify(tmp_path) == []


def test_progress_survives_restarts_snapshots_and_crashes(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put_inner(BUNDLE, progress=PROGRESS)
    store.put_inner([], progress=ServiceProgress("service", {"4": None, "5": 1}))
    want = {"service": {"3": 17, "5": 1}}
    assert store.state.progress == want
    confirm(store)
    store.abandon()
    again = open_store(tmp_path)
    assert again.state.progress == want
    again.topics.create("t", 1, [0])
    for _ in range(30):
        again.put(request([b"x" * 5000]))
    assert len(again.log.segments.files) > 2
    confirm(again)
    again.close()
    last = open_store(tmp_path)
    assert last.state.progress == want
    last.close()


def boundaries() -> list[int]:
    """The end of the bundle's records, as far from its start as here."""
    sizes = []
    for message in BUNDLE:
        store_bytes = record.encode_record(
            topic=message.topic,
            body=message.body,
            properties="".join(f"{n}\x01{v}\x02" for n, v in message.properties.items()).encode(),
            born_host=message.born_host or ("127.0.0.1", 0),
        )
        sizes.append(len(store_bytes))
    return sizes


@pytest.mark.parametrize("whole", [0, 1, 2, 3])
def test_a_bundle_whose_write_was_broken_off_is_gone_whole(tmp_path: Path, whole: int) -> None:
    files = Interrupted()
    store = open_store(tmp_path, files)
    before = store.put_inner([BUNDLE[0]])[0].end_offset
    confirm(store)
    assert store.put_inner(BUNDLE, progress=PROGRESS)
    bundle_bytes = store.log.end - before
    head = bundle_bytes - sum(boundaries())
    confirm(store)
    state = dict(store.state.progress["service"])
    start = store.log.end
    # Whole records of the second bundle, and three bytes of the next.
    files.keep = head + sum(boundaries()[:whole]) + (3 if whole < 3 else -1)
    with pytest.raises(Killed):
        store.put_inner(BUNDLE, progress=ServiceProgress("service", {"3": 18, "4": [1, "two"]}))
    files.keep = None
    store.abandon()
    again = open_store(tmp_path)
    assert again.log.end == start
    assert again.state.progress == {"service": state}
    assert again.put_inner([BUNDLE[0]])[0].first_offset == 3
    confirm(again)
    again.close()
    assert [message["body64"] for message in messages(tmp_path)].count("Zmlyc3Q=") == 3
    assert verify(tmp_path) == []


def test_what_is_too_large_for_one_append_is_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    end = store.log.end
    big = InnerMessage("a", 0, b"x" * 17000)
    with pytest.raises(Rejected, match="appended together"):
        store.put_inner([big, big], progress=PROGRESS)
    assert store.log.end == end
    store.close()


def test_prepared_messages_take_no_offset_of_their_queue(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put_inner([InnerMessage("a", 0, b"half", sys_flag=0x4)])
    assert store.put_inner([InnerMessage("a", 0, b"real")])[0].first_offset == 0
    confirm(store)
    assert read(store, "a", 0) == [b"real"]
    store.close()
    assert verify(tmp_path) == []


def test_a_delayed_message_has_its_delivery_time_in_its_unit(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put = store.put_inner([InnerMessage("SCHEDULE_TOPIC_XXXX", 2, b"x", {"DELAY": "3"})])[0]
    confirm(store)
    unit = store.consume_queues.get("SCHEDULE_TOPIC_XXXX", 2).read(0, 1)[0]
    assert unit["tags_code"] == put.store_time_ms + 10_000
    store.close()
