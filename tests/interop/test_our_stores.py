"""RocketMQ opens what we wrote: every record, unit, offset and index entry is what we read ourselves."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from raymq.store.base.files import Files
from raymq.store.config.store_config import StoreConfig
from raymq.store.engine.message_store import MessageStore
from tests.support import message_kinds as kinds
from tests.support.confirming import confirm_with_index
from tests.support.oracle import RocketMQ
from tests.support.put_kinds import put_all
from tests.support.store_facts import assert_same, read_copy


def write(root: Path, config: StoreConfig, end: str) -> None:
    """Every kind, some with a producer's stamps, over several files; then a clean end or a crash."""
    store = MessageStore.open(root, config=config)
    put_all(store, kinds.ordinary())
    put_all(store, kinds.ordinary(), producer_id=77)
    now_ms = int(time.time() * 1000)
    put_all(store, [*kinds.special(), *kinds.delayed(), *kinds.timed(now_ms)])
    if end != "crashed before dispatch":
        confirm_with_index(store)
    put_all(store, kinds.rolling(), producer_id=78)
    put_all(store, kinds.ordinary())
    if end == "closed":
        confirm_with_index(store)
        store.close()
    else:
        store.log.sync()
        store.abandon()


@pytest.mark.parametrize("end", ["closed", "crashed", "crashed before dispatch"])
def test_rocketmq_reads_all_that_we_wrote(
    rocketmq: RocketMQ, config: StoreConfig, tmp_path: Path, end: str
) -> None:
    root = tmp_path / "store"
    write(root, config, end)
    theirs = rocketmq.read(root)
    assert theirs[0]["ok"]
    assert theirs[0]["crashed"] == (end != "closed")
    ours = read_copy(root, config)
    assert_same(ours, theirs)
    written = {line["sha256"] for line in theirs if line["kind"] == "record"}
    assert len(written) > 3 * len(kinds.ordinary()) + len(kinds.rolling())
    assert len(list((root / "commitlog").iterdir())) >= 3


def test_rocketmq_reads_the_largest_message(
    rocketmq: RocketMQ, config: StoreConfig, tmp_path: Path
) -> None:
    large = StoreConfig(
        segment_size_bytes=16 << 20, consume_queue_file_size_bytes=2000, flush="async"
    )
    store = MessageStore.open(tmp_path / "s", config=large)
    put_all(store, [kinds.kind(b"4" * large.max_message_bytes), kinds.kind(b"next")])
    confirm_with_index(store)
    store.close()
    theirs = rocketmq.resized(segment=16 << 20).read(tmp_path / "s")
    assert_same(read_copy(tmp_path / "s", large), theirs)
    assert max(line["bodyLength"] for line in theirs if line["kind"] == "record") == 4 << 20


def test_rocketmq_reads_records_whose_store_host_is_an_ipv6_address(
    rocketmq: RocketMQ, config: StoreConfig, tmp_path: Path
) -> None:
    six = StoreConfig(**{**vars(config), "store_host": kinds.IPV6})
    store = MessageStore.open(tmp_path / "s", config=six)
    put_all(store, [*kinds.ordinary(), *kinds.special()], producer_id=1)
    confirm_with_index(store)
    store.close()
    theirs = rocketmq.read(tmp_path / "s")
    assert_same(read_copy(tmp_path / "s", six), theirs)
    hosts = {line["storeHost"] for line in theirs if line["kind"] == "record"}
    assert hosts == {"[2001:db8:0:0:0:0:0:2]:10911"}


@pytest.mark.parametrize("end", ["closed", "crashed"])
def test_rocketmq_finds_keys_in_all_of_our_index_files(
    rocketmq: RocketMQ, config: StoreConfig, tmp_path: Path, end: str
) -> None:
    small = StoreConfig(**{**vars(config), "max_hash_slot_num": 20, "max_index_num": 60})
    store = MessageStore.open(tmp_path / "s", config=small)
    put_all(store, kinds.rolling())
    put_all(store, [*kinds.ordinary(), *kinds.special()] * 3)
    confirm_with_index(store)
    if end == "closed":
        store.close()
    else:
        store.log.sync()
        store.abandon()
    assert len(list((tmp_path / "s" / "index").iterdir())) >= 2
    theirs = rocketmq.resized(slots=20, entries=60).read(tmp_path / "s")
    assert_same(read_copy(tmp_path / "s", small), theirs)


@pytest.mark.parametrize("end", ["closed", "crashed"])
def test_rocketmq_sees_what_is_left_when_we_deleted_old_files(
    rocketmq: RocketMQ, config: StoreConfig, tmp_path: Path, end: str
) -> None:
    soon = StoreConfig(**{**vars(config), "file_reserved_hours": 0})
    store = MessageStore.open(tmp_path / "s", config=soon)
    put_all(store, [*kinds.ordinary(), *kinds.special(), *kinds.rolling()])
    confirm_with_index(store)
    store.sync_queues()
    store.clean_service.delete_now()
    deleted = store.clean_service.run_once()
    put_all(store, kinds.ordinary())
    confirm_with_index(store)
    start = store.log.start
    assert (deleted > 0, start > 0) == (True, True)
    if end == "closed":
        store.close()
    else:
        store.abandon()
    theirs = rocketmq.read(tmp_path / "s")
    # Before the first message RocketMQ answers with the place where the queue's file begins.
    assert_same(read_copy(tmp_path / "s", soon), theirs, times=False)
    assert theirs[0]["min"] == start
    assert any(line["kind"] == "queue" and line["min"] > 0 for line in theirs)


class AfterReboot(Files):
    """The same files, on a machine that was started again."""

    def boot_id(self) -> str:
        return "another boot"


def test_what_a_torn_tail_took_away_stays_away_for_rocketmq_too(
    rocketmq: RocketMQ, config: StoreConfig, tmp_path: Path
) -> None:
    root = tmp_path / "s"
    store = MessageStore.open(root, config=config)
    put_all(store, [kinds.kind(b"first")])
    confirm_with_index(store)
    torn = store.log.end
    put_all(store, [kinds.kind(b"second" * 1000)])
    third = store.log.end
    put_all(store, [kinds.kind(b"third")])
    overhead = third - torn - len(b"second" * 1000)
    store.abandon()
    # The power failed: the second record never reached the disk, the third did.
    with (root / "commitlog" / f"{0:020d}").open("r+b") as file:
        file.seek(torn)
        file.write(bytes(third - torn))
    store = MessageStore.open(root, config=config, files=AfterReboot())
    assert store.log.recovered is not None
    assert store.log.recovered.end == torn
    # The state's snapshot comes first. The puts after it end exactly where the third one would begin.
    put_all(store, [kinds.kind(b"fourth")])
    put_all(store, [kinds.kind(b"5" * (third - store.log.end - overhead))])
    assert store.log.end == third
    store.log.sync()
    store.abandon()
    theirs = rocketmq.read(root)
    assert_same(read_copy(root, config, files=AfterReboot()), theirs)
    assert max(line["phy"] for line in theirs if line["kind"] == "record") < third
    bodies = [
        line["bodyLength"] for line in theirs if line.get("topic") == kinds.TOPIC and "phy" in line
    ]
    assert bodies[:2] == [len(b"first"), len(b"fourth")]
    assert len(bodies) == 3
