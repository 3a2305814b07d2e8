"""Lost consume queues are rebuilt, whatever happens meanwhile. Half bundles of memory mode are dropped."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from raymq.store.base import format as fmt
from raymq.store.base.files import Files
from raymq.store.config.store_config import StoreConfig
from raymq.store.engine.message_store import MessageStore
from raymq.store.put.inner_message import InnerMessage, ServiceProgress
from raymq.store.queues import reput_service
from raymq.store.tools.inspect import verify
from tests.support.clock import ManualClock
from tests.support.confirming import confirm

CONFIG = StoreConfig(
    segment_size_bytes=1 << 20, consume_queue_file_size_bytes=2000, message_index=False
)
COUNT = 20


class Boot(Files):
    """A machine that was started so many times."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def boot_id(self) -> str:
        return f"boot {self._number}"


def open_store(
    root: Path, boot: int = 1, *, flush: str = "sync", follows: bool = False
) -> MessageStore:
    config = CONFIG if flush == "sync" else StoreConfig(**{**vars(CONFIG), "flush": "async"})
    return MessageStore.open(
        root, config=config, files=Boot(boot), clock=ManualClock(), follows=follows
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store that died, with messages of queues a and b in turn."""
    store = open_store(tmp_path)
    for number in range(COUNT):
        for topic in "ba":
            store.put_inner([InnerMessage(topic, 0, b"%d" % number)])
    confirm(store)
    store.sync_queues()
    store.abandon()
    return tmp_path


def check(store: MessageStore) -> None:
    confirm(store)
    for topic in "ab":
        assert store.queue_range(topic, 0) == (0, COUNT)
        units = store.consume_queues.get(topic, 0).read(0, COUNT)
        assert (units["size"] < 1000).all()
    store.close()
    assert verify(store.log.root) == []


def test_a_power_loss_after_a_rebuild_leaves_no_gap(root: Path) -> None:
    shutil.rmtree(root / "consumequeue")
    store = open_store(root)
    assert store.log.marks.queues_synced_end <= store.dispatched == store.log.start
    confirm(store)
    store.abandon()
    # The last pages of one queue did not reach the disk, those of the other did.
    with (root / "consumequeue" / "b" / "0" / f"{0:020d}").open("r+b") as file:
        file.seek(20 * 10)
        file.write(bytes(20 * 30))
    check(open_store(root, boot=2))


@pytest.mark.parametrize("lost", ["a", "b"])
def test_one_queue_that_was_deleted_comes_back(root: Path, lost: str) -> None:
    shutil.rmtree(root / "consumequeue" / lost)
    check(open_store(root))


def test_a_kill_in_the_middle_of_a_rebuild_does_no_harm(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(root / "consumequeue" / "b")
    store = open_store(root)
    with monkeypatch.context() as slow:
        slow.setattr("raymq.store.records.rows.DECODED_ROWS_MAX", 10)
        slow.setattr(reput_service, "SLICE_MS", -1.0)
        store.log.note_confirmed(store.log.end)
        store.dispatch(store.log.confirmed)
    assert 0 < store.dispatched < store.log.end
    store.abandon()
    check(open_store(root))


def test_a_queue_without_messages_any_more_is_lost_only_once(root: Path) -> None:
    store = open_store(root)
    store.consume_queues.begin_at("gone", 0, 7)
    confirm(store)
    assert store.queue_range("gone", 0) == (7, 7)
    store.close()
    again = open_store(root)
    assert again.queue_range("gone", 0) == (7, 7)
    assert again.put_inner([InnerMessage("gone", 0, b"x")])[0].first_offset == 7
    check(again)


@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.parametrize("unit_lost", [False, True])
def test_half_a_bundle_that_memory_mode_had_confirmed_is_cut_after_a_power_loss(
    tmp_path: Path, unit_lost: bool, follows: bool
) -> None:
    store = open_store(tmp_path, flush="async")
    store.put_inner([InnerMessage("t", 0, b"before")])
    confirm(store)
    start = store.log.end
    bundle = [InnerMessage("t", 0, b"x" * 5000)] * 3
    appended = store.put_inner(bundle, progress=ServiceProgress("service", {"k": 1}))
    store.log.note_confirmed(store.log.end)
    last, end = appended[-1].physical_offset, store.log.end
    store.abandon()
    with (tmp_path / "commitlog" / f"{0:020d}").open("r+b") as file:
        file.seek(last)
        file.write(bytes(end - last))
    chain = tmp_path / "raymq" / "chain" / f"{0:020d}"
    if unit_lost:
        with chain.open("r+b") as file:
            file.truncate(chain.stat().st_size - 40)
    for _ in range(2):
        again = open_store(tmp_path, boot=2, flush="async", follows=follows)
        assert again.log.end == start
        assert again.log.confirmed <= start
        assert again.state.progress == {}
        again.abandon()


@pytest.mark.parametrize("garbage", [b"\xff" * 20, fmt.QUEUE_UNIT.pack(0, 200, 5)])
@pytest.mark.parametrize("topic", ["a", "b"])
def test_bytes_after_the_last_unit_are_gone_after_an_orderly_start_and_stop(
    tmp_path: Path, garbage: bytes, topic: str
) -> None:
    store = open_store(tmp_path)
    for each in "ab":
        store.put_inner([InnerMessage(each, 0, b"first")])
    confirm(store)
    store.close()
    path = tmp_path / "consumequeue" / topic / "0" / f"{0:020d}"
    units = path.read_bytes()
    path.write_bytes(units[:20] + garbage + units[40:])
    assert verify(tmp_path) != []
    store = open_store(tmp_path)
    # The other queue is never used.
    assert store.queue_range("a", 0) == (0, 1)
    store.put_inner([InnerMessage("a", 0, b"second")])
    confirm(store)
    assert store.queue_range("a", 0) == (0, 2)
    store.close()
    assert verify(tmp_path) == []
    assert not (tmp_path / "abort").exists()
