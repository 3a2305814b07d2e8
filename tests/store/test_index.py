"""The index: byte for byte what RocketMQ writes from the same records, and still right after every way to stop."""

from __future__ import annotations

import errno
import json
import shutil
import struct
import threading
from dataclasses import fields
from datetime import datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymq.store.base import format as fmt
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Rejected
from raymq.store.base.failpoints import failpoint
from raymq.store.base.files import Files
from raymq.store.config.store_config import StoreConfig
from raymq.store.engine.message_store import MessageStore
from raymq.store.index import index_builder
from raymq.store.index.index_file import HEADER, ITEM_GAP_BYTES, SLOT_BYTES, IndexFile
from raymq.store.index.index_keys import hash_keys, key_hash, topic_hash
from raymq.store.index.index_service import IndexService
from raymq.store.put.inner_message import InnerMessage, ServiceProgress
from raymq.store.records import properties, record
from raymq.store.records.keys import Keyed, keyed_rows, keys_of
from raymq.store.records.requests import PutRequest
from raymq.store.tools.inspect import verify
from tests.support.clock import ManualClock
from tests.support.confirming import confirm, confirm_with_index
from tests.support.golden import LINES, unpack_golden
from tests.support.simulated_disk import SimulatedDisk

GOLDEN_CONFIG = StoreConfig(segment_size_bytes=65_536, max_hash_slot_num=100, max_index_num=400)
SMALL = StoreConfig(
    segment_size_bytes=64 * 1024,
    consume_queue_file_size_bytes=2000,
    max_hash_slot_num=7,
    max_index_num=40,
)
NOW = 1_700_000_000_000


# --- keys and their hashes ------------------------------------------------------------------------


def test_a_hash_is_that_of_the_reference():
    assert key_hash("TopicTest", "k1") == 2746024


def test_a_hash_without_an_absolute_value_is_0():
    key = "mhenejuycG"
    assert fmt.java_hash("t#" + key) == -(1 << 31)
    assert key_hash("t", key) == 0
    keyed = keyed_rows([properties.encode({"KEYS": key})])
    assert keyed is not None
    assert hash_keys(topic_hash("t"), keyed).values.tolist() == [0]


texts = st.text(alphabet="ab é标😀\x01", max_size=12)
names = st.sampled_from(["KEYS", "UNIQ_KEY", "TAGS", "XKEYS", "MY_UNIQ_KEY"])


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["t", "Topic", "标"]), st.lists(st.tuples(names, texts)), st.booleans()
        ),
        max_size=30,
    )
)
@settings(max_examples=200, deadline=None)
def test_a_column_of_keys_hashes_like_each_key_alone(rows):
    data = []
    for _, pairs, cut in rows:
        text = "".join(f"{name}\x01{value}\x02" for name, value in pairs if value).encode()
        data.append(text[:-1] if cut else text)
    check_hashes([topic for topic, _, _ in rows], data)


def check_hashes(topics: list[str], data: list[bytes]) -> None:
    """The hashes of these properties strings as a column are those of each key alone."""
    offsets = np.concatenate(([0], np.cumsum([len(text) for text in data]))).astype(np.int64)
    hashes = np.array([topic_hash(topic) for topic in topics], dtype=np.uint32)
    found = hash_keys(hashes, Keyed(b"".join(data), offsets))
    want = [
        (row, key_hash(topic, key))
        for row, (topic, text) in enumerate(zip(topics, data, strict=True))
        for key in keys_of(text)
    ]
    assert list(zip(found.rows.tolist(), found.values.tolist(), strict=True)) == want


@pytest.mark.parametrize("key", ["k", "two words", "é标😀"])
@pytest.mark.parametrize(
    "other",
    [
        "",
        "KEYS\x01\x02",
        "KEYS\x01cut",
        "XKEYS\x01other\x02",
        "ABCD\x01other\x02",
        "KEYS\x01first\x02KEYS\x01last\x02",
        "KEYS\x01first\x02A\x01b\x02",
        "UNIQ_KEY\x01unique\x02",
        "A\x01KEYS\x01\x02",
        "\x02KEYS\x01late",
    ],
)
def test_records_with_one_key_hash_the_same_beside_others(key, other):
    """A column is read in a shorter way if each record has KEYS and no other property."""
    keyed = f"KEYS\x01{key}\x02"
    spare_end = f"KEYS\x01{key}\x02\x02"
    for rows in (
        [other, spare_end],
        [keyed],
        [other],
        [keyed, other],
        [other, keyed],
        [keyed, other, keyed, keyed],
    ):
        check_hashes(["t"] * len(rows), [row.encode() for row in rows])


# --- the files ------------------------------------------------------------------------------------


def index_files(root: Path) -> list[Path]:
    return sorted((root / "index").iterdir())


def test_an_index_built_from_rocketmqs_log_has_the_bytes_of_rocketmqs_index(tmp_path):
    root = unpack_golden(tmp_path)
    (theirs,) = index_files(root)
    want = theirs.read_bytes()
    theirs.unlink()
    store = MessageStore.open(root, config=GOLDEN_CONFIG)
    confirm_with_index(store)
    (ours,) = index_files(root)
    assert ours.read_bytes() == want
    assert len(ours.name) == 17
    assert ours.name.isdigit()
    store.abandon()


@pytest.mark.parametrize("garbled", [False, True])
def test_every_key_finds_what_rocketmq_finds_although_its_index_is_garbled(tmp_path, garbled):
    root = unpack_golden(tmp_path)
    (theirs,) = index_files(root)
    before = theirs.read_bytes()
    if garbled:
        theirs.write_bytes(bytes(byte ^ 0x55 for byte in before))
    store = MessageStore.open(root, config=GOLDEN_CONFIG)
    assert store.log.checkpoint.index_ms == 0
    confirm_with_index(store)
    (ours,) = index_files(root)
    assert ours.read_bytes() == before
    lines = [json.loads(line) for line in LINES.read_text(encoding="utf-8").splitlines()]
    found = 0
    for line in lines:
        if line["kind"] != "msg":
            continue
        props = line["props"]
        # The delayed message was indexed under the topic in which it waits.
        for key in [props.get("UNIQ_KEY"), *props.get("KEYS", "").split(" ")]:
            if key:
                result = store.query.by_key(line["topic"], key, exact=True)
                assert line["phy"] in result.records.column("physical_offset").to_pylist()
                found += 1
    assert found >= next(line["keys"] for line in lines if line["kind"] == "end")
    store.abandon()


class Reference:
    """RocketMQ's putKey, entry by entry, over one file after the other."""

    def __init__(self, slots: int, entries: int) -> None:
        self.slots, self.entries = slots, entries
        self.files: list[dict] = []

    def put(self, hashed: int, offset: int, time_ms: int) -> None:
        if not self.files or self.files[-1]["count"] >= self.entries:
            last = self.files[-1] if self.files else None
            ends = (last["end_ms"], last["end"]) if last else (0, 0)
            self.files.append(
                {
                    "begin_ms": ends[0],
                    "end_ms": ends[0],
                    "begin": ends[1],
                    "end": ends[1],
                    "used": 0,
                    "count": 1,
                    "slot": [0] * self.slots,
                    "entry": [(0, 0, 0, 0)] * self.entries,
                }
            )
        file = self.files[-1]
        place = hashed % self.slots
        previous = file["slot"][place]
        seconds = (time_ms - file["begin_ms"]) // 1000 if file["begin_ms"] > 0 else 0
        file["entry"][file["count"]] = (hashed, offset, max(0, seconds), previous)
        file["slot"][place] = file["count"]
        if file["count"] <= 1:
            file["begin_ms"], file["begin"] = time_ms, offset
        file["used"] += previous == 0
        file["count"] += 1
        file["end_ms"], file["end"] = time_ms, offset

    def data(self) -> list[bytes]:
        return [
            HEADER.pack(f["begin_ms"], f["end_ms"], f["begin"], f["end"], f["used"], f["count"])
            + b"".join(slot.to_bytes(4, "big") for slot in f["slot"])
            + b"".join(struct.pack(">iqii", *entry) for entry in f["entry"])
            for f in self.files
        ]


def service(root: Path, files: Files | None = None, clock: Clock | None = None) -> IndexService:
    files = files or Files()
    files.make_dirs(root / "raymq")
    return IndexService(root, SMALL, files=files, clock=clock or ManualClock())


@given(
    st.lists(
        st.lists(
            st.tuples(st.integers(0, 50), st.integers(1, 5), st.integers(0, 4000)), min_size=1
        ),
        max_size=8,
    )
)
@settings(max_examples=100, deadline=None)
def test_batches_give_the_bytes_that_one_entry_after_the_other_gives(batches):
    disk = SimulatedDisk(record=False)
    index = service(Path("/i"), disk)
    index.load(log_start=0, log_end=0, never_cut_below=0, crashed=False)
    reference = Reference(SMALL.max_hash_slot_num, SMALL.max_index_num)
    offset, time_ms = 1, NOW
    for batch in batches:
        hashes, offsets, times = [], [], []
        for hashed, step, later in batch:
            offset += step
            time_ms += later
            hashes.append(hashed)
            offsets.append(offset)
            times.append(time_ms)
            reference.put(hashed, offset, time_ms)
        index.append(
            np.array(hashes, dtype=np.int32), np.array(offsets), np.array(times), upto=offset + 1
        )
    tree = disk.tree()
    assert [tree[path] for path in sorted(tree) if path.startswith("/i/index/")] == reference.data()
    index.close()


def test_names_are_local_time_and_ascend_when_the_clock_goes_back(tmp_path):
    clock = ManualClock()
    index = service(tmp_path, clock=clock)
    index.load(log_start=0, log_end=0, never_cut_below=0, crashed=False)
    for number in range(3):
        put(index, [number * 100 + row for row in range(39)])
        clock.jump_wall(-3_600_000)
    names = [path.name for path in index_files(tmp_path)]
    local = datetime.fromtimestamp(NOW / 1000).strftime("%Y%m%d%H%M%S")
    assert names == [f"{local}000", f"{local}001", f"{local}002"]
    index.close()


def put(index: IndexService, offsets: list[int], key: str = "k") -> None:
    hashed = key_hash("t", key)
    count = len(offsets)
    index.append(
        np.full(count, hashed, dtype=np.int32),
        np.array(offsets),
        np.array([NOW + offset for offset in offsets]),
        upto=offsets[-1] + 1,
    )


def found(
    index: IndexService, key: str = "k", begin: int = 0, end: int = 1 << 60, some: int = 1 << 20
) -> list[int]:
    return [offset for part in index.find("t", key, begin, end, some) for offset in part]


def test_long_chains_are_followed_to_their_end(tmp_path, monkeypatch):
    for steps, entries in ((1, 7), (5, 1 << 16), (2048, 1 << 16)):
        monkeypatch.setattr("raymq.store.index.index_file.CHAIN_STEPS", steps)
        monkeypatch.setattr("raymq.store.index.index_file.SCAN_ENTRIES", entries)
        index = service(tmp_path / str(steps))
        index.load(log_start=0, log_end=0, never_cut_below=0, crashed=False)
        for low in range(0, 90, 3):
            put(index, [low, low + 1])
            put(index, [low + 2], key="other")
        want = [offset for offset in range(89, -1, -1) if offset % 3 < 2]
        assert found(index) == found(index, some=1) == found(index, some=7) == want
        assert found(index, begin=NOW + 3000) == []
        index.close()


def test_a_search_reads_no_further_than_its_caller(tmp_path):
    index = service(tmp_path)
    index.load(log_start=0, log_end=0, never_cut_below=0, crashed=False)
    put(index, list(range(30)))
    walk = index.find("t", "k", 0, 1 << 60, 4)
    assert [next(walk) for _ in range(2)] == [
        [29, 28, 27, 26],
        [25, 24, 23, 22],
    ]
    del walk
    index.close()


def test_entries_kept_in_memory_are_forgotten_when_the_file_is_cut(tmp_path, monkeypatch):
    monkeypatch.setattr("raymq.store.index.index_file.BLOCK_ENTRIES", 4)
    monkeypatch.setattr("raymq.store.index.index_file.BLOCKS_KEPT", 3)
    file = IndexFile.create(tmp_path / "i", 7, 40, None, files=Files())

    def add(first: int, count: int) -> None:
        offsets = np.arange(first, first + count)
        file.append(np.full(count, 5, np.int32), offsets, offsets + NOW)

    def all_found() -> list[int]:
        return [place for some in file.find(5, 0, 1 << 60) for place in some]

    add(0, 30)
    for _ in range(2):
        assert all_found() == list(range(29, -1, -1))
    file.truncate(12)
    assert all_found() == list(range(10, -1, -1))
    add(100, 5)
    assert all_found() == [104, 103, 102, 101, 100, *range(10, -1, -1)]
    file.close()


def test_expired_files_go_but_never_the_newest(tmp_path):
    index = service(tmp_path)
    index.load(log_start=0, log_end=0, never_cut_below=0, crashed=False)
    put(index, list(range(100)))
    assert len(index_files(tmp_path)) == 3
    assert index.delete_expired(39) == 1
    assert found(index) == list(range(99, 38, -1))
    assert index.delete_expired(1000) == 1
    assert len(index_files(tmp_path)) == 1
    assert found(index) == list(range(99, 77, -1))
    index.close()


def test_a_file_deleted_under_a_reader_only_ends_its_search(tmp_path):
    index = service(tmp_path)
    index.load(log_start=0, log_end=0, never_cut_below=0, crashed=False)
    put(index, list(range(78)))
    walk = index.find("t", "k", 0, 1 << 60)
    assert next(walk)[0] == 77
    index.delete_expired(1000)
    assert list(walk) == []
    index.close()


@pytest.mark.parametrize("stretch", [50, 100 * ITEM_GAP_BYTES // SLOT_BYTES])
def test_many_hashes_find_what_each_finds_alone_near_and_far_apart(tmp_path, stretch):
    file = IndexFile.create(tmp_path / "i", stretch, 9000, None, files=Files())
    random = np.random.default_rng(3)
    hashes = random.integers(0, 3 * stretch, 300)[random.integers(0, 300, 8000)].astype(np.int32)
    file.append(hashes, np.arange(8000) * 100, np.full(8000, NOW))
    asked = np.unique(hashes)[::7].astype(np.int64)
    for wanted in (1, 5, 8000):
        many = file.find_many(asked, np.full(len(asked), wanted), 0, 1 << 60)
        for row, one in enumerate(asked.tolist()):
            alone = [place for some in file.find(one, 0, 1 << 60, wanted) for place in some]
            assert many[1][many[0] == row].tolist() == alone[:wanted]
    file.close()


@pytest.mark.parametrize(
    "point", ["index.file_created", "index.entries_written", "index.slots_written"]
)
@pytest.mark.parametrize("count", [2, 60])
def test_lookups_while_it_is_built_find_all_that_was_there(tmp_path, point, count):
    index = service(tmp_path)
    index.load(log_start=0, log_end=0, never_cut_below=0, crashed=False)
    put(index, list(range(39)))
    seen = []

    def look() -> None:
        many, _ = index.find_many(np.array([key_hash("t", "k")]), 1000, 0, 1 << 60)
        seen.append((found(index)[::-1], len(many)))

    with failpoint(point, look):
        put(index, list(range(39, 39 + count)))
    for offsets, many in seen:
        assert offsets == list(range(max(39, len(offsets))))
        assert many == len(offsets) < 39 + count
    assert seen
    assert found(index)[::-1] == list(range(39 + count))
    index.close()


class Slow(Files):
    """Another thread works while a file is synced, and takes the time that it can get."""

    def __init__(self) -> None:
        super().__init__()
        self.meanwhile: threading.Thread | None = None
        self.synced = 0

    def sync_data(self, fd: int) -> None:
        super().sync_data(fd)
        self.synced += 1
        if self.meanwhile is not None:
            other, self.meanwhile = self.meanwhile, None
            other.start()
            other.join(0.05)


def test_what_is_indexed_while_a_file_is_synced_is_synced_by_the_next_sync(tmp_path):
    files = Slow()
    index = service(tmp_path, files)
    index.load(log_start=0, log_end=0, never_cut_below=0, crashed=False)
    put(index, [0, 1])
    other = files.meanwhile = threading.Thread(target=put, args=(index, [2, 3]))
    index.sync()
    other.join()
    before = files.synced
    index.sync()
    # The file, and the mark that names it.
    assert files.synced == before + 2
    assert found(index) == [3, 2, 1, 0]
    index.close()


# --- in a store -----------------------------------------------------------------------------------


def keyed_request(
    keys: list[str | None], *, topic: str = "t", queue: int = 0, unique: bool = False
) -> PutRequest:
    """One message a key; its body is its key."""
    column = []
    for number, key in enumerate(keys):
        pairs = {"KEYS": key} if key else {"other": "x"}
        if unique:
            pairs["UNIQ_KEY"] = f"U{number:03d}"
        column.append(properties.encode(pairs))
    count = len(keys)
    batch = pa.record_batch(
        [
            pa.array([(key or "none").encode() for key in keys], pa.binary()),
            pa.array([None] * count, pa.string()),
            pa.array(column, pa.binary()),
            pa.array([NOW] * count, pa.int64()),
        ],
        schema=record.PUT_SCHEMA,
    )
    return PutRequest(topic, queue, batch, None, 0, 0, "quorum")


def bodies(store: MessageStore, key: str, **options: object) -> list[bytes]:
    return store.query.by_key("t", key, exact=True, **options).records.column("body").to_pylist()


def opened(root: Path, **options: object) -> MessageStore:
    store = MessageStore.open(root, config=SMALL, **{"clock": ManualClock(), **options})
    if "t" not in store.state.topics:
        store.topics.create("t", 2, [0])
    return store


KEYS = [f"a{number} b{number % 3}" if number % 4 else None for number in range(150)]


def check_keys(store: MessageStore, count: int = 150) -> None:
    for number in range(count):
        if number % 4:
            assert bodies(store, f"a{number}") == [KEYS[number].encode()], number
    assert len(bodies(store, "b1")) == len([n for n in range(count) if n % 4 and n % 3 == 1])


def test_keyed_messages_are_found_whether_put_alone_or_in_batches(tmp_path):
    store = opened(tmp_path)
    for low in (0, 1, 2, 50, 149):
        high = {0: 1, 1: 2, 2: 50, 50: 149, 149: 150}[low]
        store.put(keyed_request(KEYS[low:high]))
        confirm_with_index(store)
    check_keys(store)
    store.close()


def test_records_of_several_topics_are_indexed_together_each_by_its_own(tmp_path):
    store = opened(tmp_path)
    store.topics.create("other", 1, [0])
    store.put(keyed_request(["a", "b", "a"]))
    store.put(keyed_request(["a", "b"], topic="other"))
    store.put(keyed_request(["a"]))
    confirm_with_index(store)
    for topic, key, found in (("t", "a", 3), ("t", "b", 1), ("other", "a", 1), ("other", "b", 1)):
        hits = store.index.find(topic, key, 0, NOW + 1000)
        assert len([offset for page in hits for offset in page]) == found, (topic, key)
    store.close()


def test_unique_keys_come_before_keys_and_records_without_keys_are_not_indexed(tmp_path):
    store = opened(tmp_path)
    store.put(keyed_request(["k1 k2", None, "k1"], unique=True))
    confirm_with_index(store)
    (path,) = index_files(tmp_path)
    entries = store.index._index_files[-1]._entries(1, store.index._index_files[-1].header.count)
    want = [key_hash("t", key) for key in ("U000", "k1", "k2", "U001", "U002", "k1")]
    assert entries["hash"].tolist() == want
    store.close()
    assert path.stat().st_blocks * 512 < 64 * 1024


def test_a_store_without_keys_has_no_index_file(tmp_path):
    store = opened(tmp_path)
    store.put(keyed_request([None] * 100))
    confirm_with_index(store)
    assert store.index.indexed == store.log.end
    store.close()
    assert not (tmp_path / "index").exists()


def test_prepared_messages_are_indexed_and_rolled_back_ones_are_not(tmp_path):
    store = opened(tmp_path)
    for number, kind in enumerate((0x4, 0x8, 0xC)):
        store.put_inner(
            [InnerMessage("t", 0, b"%d" % number, {"KEYS": "k"}, sys_flag=kind)],
            progress=ServiceProgress("test", {}),
        )
    confirm_with_index(store)
    assert bodies(store, "k") == [b"0", b"1"]
    store.close()


@pytest.mark.parametrize("stop", ["close", "abandon"])
def test_after_every_way_to_stop_every_key_is_found_once(tmp_path, stop):
    store = opened(tmp_path)
    done = 0
    for high in (10, 60, 61, 110, 150):
        store.put(keyed_request(KEYS[done:high]))
        confirm_with_index(store)
        if high in (60, 110):
            store.sync_queues()
        done = high
        getattr(store, stop)()
        store = opened(tmp_path)
        confirm_with_index(store)
        check_keys(store, high)
    entries = sum(file.header.count - 1 for file in store.index._index_files)
    assert entries == 2 * len([key for key in KEYS if key])
    store.close()


@pytest.mark.parametrize(
    "lost", ["index", "raymq/index", "both", "newest", "damaged mark", "short"]
)
def test_an_index_that_was_lost_or_damaged_is_built_again(tmp_path, lost):
    store = opened(tmp_path)
    store.put(keyed_request(KEYS))
    confirm_with_index(store)
    store.close()
    if lost in ("index", "both"):
        shutil.rmtree(tmp_path / "index")
    if lost in ("raymq/index", "both"):
        (tmp_path / "raymq" / "index").unlink()
    if lost == "newest":
        index_files(tmp_path)[-1].unlink()
    if lost == "short":
        with index_files(tmp_path)[0].open("r+b") as file:
            file.truncate(100)
    if lost == "damaged mark":
        (tmp_path / "raymq" / "index").write_bytes(b"x" * 8192)
    store = opened(tmp_path)
    confirm_with_index(store)
    check_keys(store)
    store.close()


def test_keys_are_found_again_after_a_crash_before_the_first_sync_whose_abort_file_was_removed(
    tmp_path,
):
    store = opened(tmp_path)
    store.put(keyed_request(KEYS[:60]))
    confirm_with_index(store)
    store.put(keyed_request(KEYS[60:]))
    store.log.sync()
    store.log.note_confirmed(store.log.end)
    store.abandon()
    (tmp_path / "abort").unlink()
    assert "each key of a record has an index entry" in [found.rule for found in verify(tmp_path)]
    store = opened(tmp_path)
    confirm_with_index(store)
    check_keys(store)
    store.close()
    assert verify(tmp_path) == []


def test_slots_and_entries_after_the_mark_are_cut_after_a_crash(tmp_path):
    store = opened(tmp_path)
    store.put(keyed_request(KEYS[:15]))
    confirm_with_index(store)
    store.sync_queues()
    (path,) = index_files(tmp_path)
    before = path.read_bytes()
    store.put(keyed_request(KEYS[15:20]))
    confirm_with_index(store)
    after = path.read_bytes()
    assert after != before
    store.abandon()
    # Pages reached the disk in any order: slots of the new state, no entries, the old header or the new one.
    start = HEADER.size + 4 * SMALL.max_hash_slot_num
    for header in (before[: HEADER.size], after[: HEADER.size]):
        path.write_bytes(header + after[HEADER.size : start] + before[start:])
        store = opened(tmp_path)
        assert path.read_bytes() == before
        confirm_with_index(store)
        assert path.read_bytes() == after
        check_keys(store, 20)
        store.abandon()


def test_nothing_points_above_the_end_of_a_log_that_was_cut(tmp_path):
    config = SMALL
    store = opened(tmp_path)
    store.put(keyed_request(KEYS[:20]))
    confirm_with_index(store)
    end = store.log.end
    store.put(keyed_request(KEYS[20:100]))
    confirm_with_index(store)
    store.sync_queues()
    store.abandon()
    # An async flush: the confirmed end was above what a power loss left.
    index = IndexService(tmp_path, config, files=Files(), clock=ManualClock())
    index.load(log_start=0, log_end=end, never_cut_below=1 << 60, crashed=True)
    assert index.indexed == end
    assert max(max(found(index, f"b{n}", 0)) for n in range(3)) < end
    assert index._index_files[-1].header.end_offset < end
    index.close()


def test_a_full_disk_makes_only_the_index_lag():
    disk = SimulatedDisk(record=False)
    clock = ManualClock()
    store = opened(Path("/s"), files=disk, clock=clock)
    store.put(keyed_request(KEYS[:10]))
    confirm_with_index(store)
    store.put(keyed_request(KEYS[10:80]))
    store.log.sync()
    store.log.note_confirmed(store.log.end)
    # The consume queue's file is there. The writes of entries fail, then of the header, then of the next file.
    for kind, at in (("pwrite", 2), ("pwrite", 3), ("allocate", 1)):
        disk.fail(kind, at=at, error=errno.ENOSPC, forever=kind == "allocate")
        # First the consume queues, then the index.
        store.dispatch(store.log.confirmed)
        store.dispatch(store.log.confirmed)
        disk.heal()
        assert store.dispatched == store.log.end
        assert store.index.indexed < store.log.end
        assert not store.reput.index_behind
        clock.advance(1000)
        assert store.reput.index_behind
    while store.reput.index_behind:
        store.dispatch(store.log.confirmed)
    check_keys(store, 80)
    store.close()


def test_a_lagging_index_catches_up_while_no_dispatch_is_idle(tmp_path):
    store = opened(tmp_path)
    store.put(keyed_request(KEYS[:20]))
    confirm(store)
    behind = store.log.end
    store.abandon()
    store = opened(tmp_path)
    assert store.index.indexed < behind
    store.put(keyed_request(KEYS[20:40]))
    confirm(store)
    assert store.index.indexed == store.log.end
    check_keys(store, 40)
    store.close()


def test_the_end_of_a_commit_log_file_does_not_make_the_index_lag(tmp_path, monkeypatch):
    store = opened(tmp_path)
    confirm_with_index(store)
    monkeypatch.setattr(index_builder, "SLICE_RECORDS", 8)
    store.put(keyed_request(KEYS[:20]))
    store.log.seal(0)
    store.put(keyed_request(KEYS[20:40]))
    store.log.sync()
    store.log.note_confirmed(store.log.end)
    assert store.dispatch(store.log.confirmed) == store.log.end
    assert not store.reput.index.due(store.dispatched)
    confirm_with_index(store)
    check_keys(store, 40)
    store.close()


def test_records_wait_to_be_indexed_together_but_not_with_too_many_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(index_builder, "BATCH_BYTES", 800)
    store = opened(tmp_path)
    confirm_with_index(store)
    behind = []
    for key in ("x" * 300, "x" * 600, "x" * 100):
        store.put(keyed_request([key]))
        confirm(store)
        behind.append(store.reput.index_behind)
    assert behind == [True, False, True]
    store.close()


def test_a_store_that_does_not_index_says_so_by_finding_nothing(tmp_path):
    config = StoreConfig(
        **{**{f.name: getattr(SMALL, f.name) for f in fields(SMALL)}, "message_index": False}
    )
    store = MessageStore.open(tmp_path, config=config)
    store.topics.create("t", 2, [0])
    store.put(keyed_request(KEYS[:10]))
    confirm_with_index(store)
    assert bodies(store, "a1") == []
    store.close()
    assert not (tmp_path / "abort").exists()
    # Switched on again, it is built for everything.
    store = opened(tmp_path)
    confirm_with_index(store)
    check_keys(store, 10)
    store.close()


@pytest.mark.parametrize(
    ("field", "value"), [("max_hash_slot_num", 0), ("max_index_num", 1), ("max_index_num", 1 << 31)]
)
def test_an_index_of_impossible_numbers_is_refused(field, value):
    with pytest.raises(Rejected) as caught:
        StoreConfig(**{field: value})
    assert caught.value.field == field


def test_records_without_keys_do_not_move_the_mark_at_every_sync():
    disk = SimulatedDisk(record=False)
    index = service(Path("/i"), disk)
    index.load(log_start=0, log_end=0, never_cut_below=0, crashed=False)
    put(index, [1])
    index.sync()
    writes = disk.calls["pwrite"]
    index.indexed = 1 << 20
    index.sync()
    assert disk.calls["pwrite"] == writes
    index.indexed = 1 << 30
    index.sync()
    assert disk.calls["pwrite"] == writes + 1
    index.indexed += 1
    index.sync(closing=True)
    assert disk.calls["pwrite"] == writes + 2
    index.close()


def test_a_start_on_a_full_disk_does_without_the_index():
    disk = SimulatedDisk(record=False)
    store = opened(Path("/s"), files=disk)
    store.put(keyed_request(KEYS[:20]))
    confirm_with_index(store)
    store.sync_queues()
    store.put(keyed_request(KEYS[20:30]))
    confirm_with_index(store)
    store.abandon()
    # The start first allocates the slots of the index.
    disk.fail("allocate", error=errno.ENOSPC)
    store = opened(Path("/s"), files=disk)
    assert store.index.indexed == store.log.start
    disk.heal()
    confirm_with_index(store)
    check_keys(store, 30)
    store.close()
