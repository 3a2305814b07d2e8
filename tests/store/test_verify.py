"""`verify` names file, offset and rule of each fault, of every file that a store has, and no other."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from raymq.store.base import format as fmt
from raymq.store.base.errors import Corrupt
from raymq.store.config.store_config import StoreConfig
from raymq.store.delay.timer_log import TIMER_UNIT_DTYPE
from raymq.store.embedded.embedded_store import EmbeddedStore
from raymq.store.engine.message_store import MessageStore
from raymq.store.index.index_file import HEADER
from raymq.store.log.chain import CHAIN_UNIT_BYTES, unpack_units
from raymq.store.records import properties
from raymq.store.records.requests import PutRequest
from raymq.store.tools.faults import NAMED_MAX
from raymq.store.tools.inspect import check, verify
from raymq.store.tools.repair import Repair
from raymq.store.tools.verify_files import json_fault
from tests.support.batches import batch, request
from tests.support.clock import ManualClock
from tests.support.damaged_store import (
    CONFIG,
    FIRST_LOG,
    SEGMENT,
    copy,
    flip,
    patch,
    tree,
)

#: options for the golden store
GOLDEN = StoreConfig(segment_size_bytes=SEGMENT, max_hash_slot_num=100, max_index_num=400)
CHAIN = "raymq/chain/00000000000000000000"
QUEUE = "consumequeue/t/1/00000000000000000000"
INDEX = "index/20261121023720699"
#: of the golden index: 100 slots after the header, entry 0 is never used
ENTRIES = 40 + 4 * 100


def units_of(root: Path) -> list[tuple[int, int]]:
    """[start, end) of the append units in the first file, blanks left out."""
    return [(u.start, u.end) for u in unpack_units((root / CHAIN).read_bytes())][:-1]


def test_sound_stores_have_no_fault_and_nothing_is_written(own: Path, golden: Path) -> None:
    for root in (own, golden):
        before = tree(root)
        assert verify(root) == []
        assert tree(root) == before


def test_rot_in_a_header_or_in_properties_is_found_by_the_chain_alone(
    own: Path, tmp_path: Path
) -> None:
    """The body CRC of RocketMQ covers neither."""
    start, end = units_of(own)[5]
    for n, at in enumerate((start + 16, start + 40, start + 72, end - 2)):
        root = copy(own, tmp_path / str(n))
        flip(root / FIRST_LOG, at)
        (fault,) = verify(root)
        assert (fault.file, fault.offset, fault.rule) == (FIRST_LOG, start, "recovery row A")
        assert "chain unit" in fault.detail


def test_each_of_several_damaged_places_is_named(own: Path, tmp_path: Path) -> None:
    root = copy(own, tmp_path / "s")
    places = [units_of(own)[3][0], units_of(own)[7][0], units_of(own)[12][0]]
    for start in places:
        flip(root / FIRST_LOG, start + 200)
    second = sorted((root / "raymq/chain").iterdir())[1]
    far = unpack_units(second.read_bytes())[4].start
    flip(root / f"commitlog/{SEGMENT:020d}", far + 60 - SEGMENT)
    faults = verify(root)
    assert [(f.file, f.offset) for f in faults] == [
        *((FIRST_LOG, start) for start in places),
        (f"commitlog/{SEGMENT:020d}", far),
    ]
    assert [f.rule for f in faults] == ["recovery row A"] + ["bytes equal their chain unit"] * 3


def test_rot_in_the_middle_is_damage_and_a_torn_tail_is_none(own: Path, tmp_path: Path) -> None:
    """The same bytes lost: at the end above the synced end a start cuts them, elsewhere it refuses."""
    torn = copy(own, tmp_path / "torn")
    store = MessageStore.open(torn, config=CONFIG, clock=ManualClock(1 << 42))
    end = store.log.end
    store.log.append(b"\0\0\1\0" + fmt.MAGIC_V1.to_bytes(4, "big") + b"x" * 40, 0)
    store.abandon()
    # The machine dies: the chain unit of the torn append is lost with it, and the mark is old.
    last = sorted((torn / "raymq/chain").iterdir())[-1]
    last.write_bytes(last.read_bytes()[:-CHAIN_UNIT_BYTES])
    patch(torn / "raymq/marks", 0, struct.pack("=q", end))
    report = check(torn)
    assert report.faults == []
    assert report.verdict is not None
    assert (report.verdict.decision, report.verdict.end) == ("truncate", end)
    assert report.verdict.row == "D"
    rotten = copy(own, tmp_path / "rotten")
    start = units_of(own)[2][0]
    patch(rotten / FIRST_LOG, start, bytes(48))
    report = check(rotten)
    assert report.verdict is not None
    assert (report.verdict.decision, report.verdict.end) == ("corrupt", start)


def unit(position: int, size: int, code: int) -> bytes:
    return struct.pack(">qiq", position, size, code)


@pytest.mark.parametrize(
    ("damage", "rule"),
    [
        (lambda old: unit(old[0] + 1, old[1], old[2]), "a unit points at its record"),
        (lambda old: unit(old[0], old[1] + 1, old[2]), "a unit has its record's size"),
        (lambda old: unit(old[0], old[1], old[2] + 1), "a unit has its record's tags code"),
    ],
)
def test_a_changed_unit_is_named_with_its_place(
    own: Path, tmp_path: Path, damage: Callable[[tuple[int, ...]], bytes], rule: str
) -> None:
    root = copy(own, tmp_path / "s")
    old = struct.unpack_from(">qiq", (root / QUEUE).read_bytes(), 33 * 20)
    patch(root / QUEUE, 33 * 20, damage(old))
    (fault,) = verify(root)
    assert (fault.file, fault.offset, fault.rule) == (QUEUE, 33 * 20, rule)
    assert "queue offset 33" in fault.detail


def test_a_lost_unit_and_all_after_it_are_missing(own: Path, tmp_path: Path) -> None:
    root = copy(own, tmp_path / "s")
    patch(root / QUEUE, 33 * 20, bytes(20))
    faults = verify(root)
    assert [f.rule for f in faults].count("each message has its unit") == NAMED_MAX
    missing = [f for f in faults if f.rule == "each message has its unit"]
    assert (missing[0].file, missing[0].offset) == (QUEUE, 33 * 20)
    # 120 messages, the first 33 are found.
    assert missing[-1].detail.endswith(f"and {87 - NAMED_MAX} more")
    assert "nothing follows the last unit" in [f.rule for f in faults]


def test_a_lost_consume_queue_is_a_fault_while_another_one_would_hide_it_from_a_start(
    own: Path, golden: Path, tmp_path: Path
) -> None:
    root = copy(own, tmp_path / "one")
    shutil.rmtree(root / "consumequeue/t/1")
    faults = verify(root)
    assert {f.file for f in faults} == {"consumequeue/t/1"}
    # Without any a start makes all of them again.
    shutil.rmtree(root / "consumequeue")
    assert verify(root) == []
    other = copy(golden, tmp_path / "golden")
    shutil.rmtree(other / "consumequeue/BatchT")
    assert {f.rule for f in verify(other)} == {"each message has its unit"}


def test_a_unit_without_a_record_is_a_fault(own: Path, tmp_path: Path) -> None:
    root = copy(own, tmp_path / "s")
    file = root / QUEUE
    count = 120 - 100  # of the second file of 100 units
    second = file.with_name(f"{2000:020d}")
    patch(second, count * 20, unit(0, 100, 0))
    (fault,) = verify(root)
    assert (fault.file, fault.offset) == (f"consumequeue/t/1/{2000:020d}", count * 20)
    assert fault.rule == "a unit points at its record"


def test_a_torn_or_broken_chain_is_a_fault_of_an_orderly_end_only(
    own: Path, tmp_path: Path
) -> None:
    root = copy(own, tmp_path / "torn")
    file = sorted((root / "raymq/chain").iterdir())[-1]
    file.write_bytes(file.read_bytes()[:-7])
    assert [f.rule for f in verify(root)] == [
        "chain files hold whole units",
        "the chain covers the log",
    ]
    (root / "abort").write_bytes(b"1")
    assert verify(root) == []
    root = copy(own, tmp_path / "broken")
    flip(root / CHAIN, 9 * CHAIN_UNIT_BYTES + 30)
    faults = verify(root)
    assert [(f.file, f.offset, f.rule) for f in faults] == [
        (CHAIN, 9 * CHAIN_UNIT_BYTES, "a chain unit continues the one before")
    ]


def test_what_rocketmq_appended_to_our_store_has_no_chain_and_needs_none(
    own: Path, tmp_path: Path
) -> None:
    root, longer = copy(own, tmp_path / "s"), copy(own, tmp_path / "longer")
    store = EmbeddedStore(longer, config=CONFIG)
    store.put(request([b"appended" * 100], topic="t", queue=0))
    store.close()
    # RocketMQ writes its own files and leaves ours alone.
    for name in ("commitlog", "consumequeue"):
        shutil.rmtree(root / name)
        shutil.copytree(longer / name, root / name)
    shutil.copy(longer / "checkpoint", root / "checkpoint")
    assert verify(root) == []
    chain = sorted((root / "raymq/chain").iterdir())[-1]
    chain.write_bytes(chain.read_bytes()[:-CHAIN_UNIT_BYTES])
    assert [fault.rule for fault in verify(root)] == ["the chain covers the log"]


def test_the_checkpoint_is_as_long_as_it_must_be_and_not_ahead_of_the_log(
    own: Path, golden: Path, tmp_path: Path
) -> None:
    for n, source in enumerate((own, golden)):
        root = copy(source, tmp_path / str(n))
        patch(root / "checkpoint", 8, struct.pack(">q", 1 << 60))
        (fault,) = verify(root)
        assert (fault.file, fault.offset) == ("checkpoint", 8)
        (root / "checkpoint").write_bytes(b"\0" * 20)
        (fault,) = verify(root)
        assert (fault.file, fault.rule) == ("checkpoint", "the checkpoint has its five longs")


def test_marks_are_one_page_of_offsets_below_the_appended_end(own: Path, tmp_path: Path) -> None:
    root = copy(own, tmp_path / "s")
    patch(root / "raymq/marks", 24, struct.pack("=q", -5))
    (fault,) = verify(root)
    assert (fault.file, fault.offset) == ("raymq/marks", 24)


@pytest.mark.parametrize(
    ("lost", "file", "words"),
    [
        ("commitlog/*", "commitlog", "none is; "),
        ("raymq/meta", "raymq/meta", "identity and promises are gone"),
    ],
)
def test_a_log_or_a_meta_that_is_gone_is_a_fault(
    own: Path, tmp_path: Path, lost: str, file: str, words: str
) -> None:
    root = copy(own, tmp_path / "s")
    for path in root.glob(lost):
        path.unlink()
    faults = {fault.file: fault.detail for fault in verify(root)}
    assert words in faults[file]


def test_a_poisoned_store_says_so(own: Path, tmp_path: Path) -> None:
    root = copy(own, tmp_path / "s")
    store = MessageStore.open(root, config=CONFIG, clock=ManualClock(1 << 42))
    store.log.health.poison("fdatasync: EIO")
    store.abandon()
    assert [(f.file, f.rule) for f in verify(root)] == [("raymq/meta", "poisoned")]


@pytest.mark.parametrize(
    ("offset", "data", "rule"),
    [
        (ENTRIES + 7 * 20, b"\0\0\0\1", "an index entry is of a key of its record"),
        (ENTRIES + 7 * 20 + 4, struct.pack(">q", 3), "an index entry is of a key of its record"),
        (ENTRIES + 7 * 20 + 12, struct.pack(">i", 9999), "an index entry has its record's time"),
        (
            ENTRIES + 136 * 20 + 16,
            struct.pack(">i", 2),
            "entries of a slot are linked, newest first",
        ),
        (40 + 4 * 55, struct.pack(">i", 1), "entries of a slot are linked, newest first"),
        (32, struct.pack(">i", 5), "an index header says what its entries say"),
        (16, struct.pack(">q", 5), "an index header says what its entries say"),
        (36, struct.pack(">i", 500), "an index header says what its entries say"),
        (36, struct.pack(">i", 120), "each key of a record has an index entry"),
    ],
)
def test_a_changed_index_is_named(
    golden: Path, tmp_path: Path, offset: int, data: bytes, rule: str
) -> None:
    root = copy(golden, tmp_path / "s")
    patch(root / INDEX, offset, data)
    if rule.startswith("each key"):
        # Entries are lost from the end. The header would say so, but for its last offset.
        last = struct.unpack_from(">q", (root / INDEX).read_bytes(), ENTRIES + 136 * 20 + 4)[0]
        patch(root / INDEX, 24, struct.pack(">q", last))
    faults = verify(root)
    assert {f.file for f in faults} == {INDEX}
    assert rule in {f.rule for f in faults}
    first = next(f for f in faults if f.rule == rule)
    if offset >= ENTRIES and not rule.startswith("each"):
        assert first.offset == ENTRIES + (offset - ENTRIES) // 20 * 20


def test_an_index_file_of_another_length_and_one_of_a_crashed_store(
    golden: Path, tmp_path: Path
) -> None:
    root = copy(golden, tmp_path / "s")
    data = (root / INDEX).read_bytes()
    (root / INDEX).write_bytes(data[:-1])
    assert [f.rule for f in verify(root)] == ["an index file has its header, slots and entries"]
    (root / INDEX).write_bytes(data)
    flip(root / INDEX, 34)
    assert len(verify(root)) == 1
    # RocketMQ deletes the file then and makes it again.
    (root / "abort").write_bytes(b"1")
    assert verify(root) == []


def test_an_index_file_that_a_crash_left_without_bytes_is_a_fault_only_after_an_orderly_stop(
    golden: Path, tmp_path: Path
) -> None:
    root = copy(golden, tmp_path / "s")
    (root / INDEX).write_bytes(b"")
    assert [f.file for f in verify(root)] == [INDEX]

    (root / "abort").write_bytes(b"1")
    report = check(root)
    assert (report.faults, report.rebuilt_at_start) == ([], [INDEX])
    config = StoreConfig(segment_size_bytes=65_536, max_hash_slot_num=100, max_index_num=400)
    store = MessageStore.open(root, config=config)
    assert not (root / INDEX).exists()
    store.abandon()


@pytest.mark.parametrize(("slots", "entries"), [(100, 400), (20, 61), (7, 15), (50, 51)])
def test_a_new_index_file_without_an_entry_is_not_a_fault(
    tmp_path: Path, slots: int, entries: int
) -> None:
    sizes = {"max_hash_slot_num": slots, "max_index_num": entries}
    config = StoreConfig(**{**vars(CONFIG), **sizes})
    store = EmbeddedStore(tmp_path, config=config)
    store.create_topic("t", 1)
    keyed = batch([b"body"] * 5, properties=properties.encode({"KEYS": "key"}))
    store.put(PutRequest("t", 0, keyed, None, 0, 0, "quorum"))
    store.close()
    (index,) = (tmp_path / "index").iterdir()
    # A new file has only the end time of the file before.
    _, end_ms, _, end, _, _ = HEADER.unpack(index.read_bytes()[: HEADER.size])
    new = index.with_name(str(int(index.name) + 1))
    blank = bytes(index.stat().st_size - HEADER.size)
    new.write_bytes(HEADER.pack(end_ms, end_ms, end, end, 0, 0) + blank)
    assert verify(tmp_path) == []
    new.write_bytes(HEADER.pack(end_ms, end_ms, end, end, 0, 0) + b"\1" * len(blank))
    assert {fault.file for fault in verify(tmp_path)} == {f"index/{new.name}"}


def test_keys_of_one_record_in_two_index_files_of_which_a_start_drops_the_second(
    tmp_path: Path,
) -> None:
    config = StoreConfig(**{**vars(CONFIG), "max_hash_slot_num": 5, "max_index_num": 12})
    store = EmbeddedStore(tmp_path, config=config)
    store.create_topic("t", 1)
    keyed = batch([b"body"] * 6, properties=properties.encode({"KEYS": "a b c"}))
    store.put(PutRequest("t", 0, keyed, None, 0, 0, "quorum"))
    store.close()
    # As RocketMQ leaves it in a crash: 11 of 18 entries are in the first file, the second is not known to be synced.
    shutil.rmtree(tmp_path / "raymq")
    (tmp_path / "abort").touch()
    first, second = sorted((tmp_path / "index").iterdir())
    end_ms = HEADER.unpack(second.read_bytes()[: HEADER.size])[1]
    patch(first, 8, struct.pack(">q", end_ms - 10))
    patch(tmp_path / "checkpoint", 16, struct.pack(">q", end_ms - 5))
    report = check(tmp_path)
    assert (report.faults, report.rebuilt_at_start) == ([], [f"index/{second.name}"])


@pytest.mark.parametrize(
    ("text", "offset"),
    [
        (b'{"offsetTable":{"t@g":{0:12,1:3}}}', None),
        (b'{"a":"x,1:2","b":{ -5 :1}}', None),
        (b"", None),
        (b'{"a":', 5),
        (b"[1]", 0),
        (b'{"a":\xff}', 5),
    ],
)
def test_config_files_are_read_in_fastjsons_dialect(
    golden: Path, tmp_path: Path, text: bytes, offset: int | None
) -> None:
    root = copy(golden, tmp_path / "s")
    (root / "config").mkdir()
    (root / "config" / "consumerOffset.json").write_bytes(text)
    faults = verify(root)
    if offset is None:
        assert faults == []
    else:
        (fault,) = faults
        assert (fault.file, fault.offset) == ("config/consumerOffset.json", offset)


def test_a_digit_in_a_string_is_not_a_key() -> None:
    assert json_fault(json.dumps({"k": '{1:"', "m": "\\"}).encode()) is None


def timer_unit(position: int, previous: int) -> bytes:
    row = np.zeros(1, dtype=TIMER_UNIT_DTYPE)
    row["size"], row["previous"], row["position"], row["magic"] = 52, previous, position, 1
    return row.tobytes()


def test_timer_files_point_at_records_and_at_each_other(own: Path, tmp_path: Path) -> None:
    root = copy(own, tmp_path / "s")
    start, _ = units_of(own)[5]
    (root / "timerlog").mkdir()
    log = root / "timerlog" / f"{0:020d}"
    log.write_bytes((timer_unit(start, -1) + timer_unit(start, 0)).ljust(5200, b"\0"))
    wheel = root / "timerwheel"
    wheel.write_bytes(bytes(32) + struct.pack(">qqqii", 5, 0, 52, 2, 0) + bytes(64))
    assert verify(root) == []
    patch(log, 52 + 28, struct.pack(">q", start + 1))
    patch(wheel, 32 + 16, struct.pack(">q", 104))
    assert [(f.file, f.offset) for f in verify(root)] == [
        (f"timerlog/{0:020d}", 52),
        ("timerwheel", 32),
    ]


def test_half_a_bundle_is_left_out_as_a_start_would(own: Path, tmp_path: Path) -> None:
    root = copy(own, tmp_path / "s")
    store = MessageStore.open(root, config=CONFIG, clock=ManualClock(1 << 42))
    store.inner_put.put_state_record(
        "PROGRESS", json.dumps({"service": "x", "set": {}, "end": 1 << 50}).encode()
    )
    store.abandon()
    assert verify(root) == []


# --- what does not belong -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["own", "golden"])
@pytest.mark.parametrize("place", ["stray", "TOPIC/7", "TOPIC/note.txt"])
def test_a_file_where_a_directory_belongs_is_named_and_stops_no_start(
    own: Path, golden: Path, tmp_path: Path, kind: str, place: str
) -> None:
    template, topic, config = (own, "t", CONFIG) if kind == "own" else (golden, "RollT", GOLDEN)
    root = copy(template, tmp_path / "s")
    stray = root / "consumequeue" / place.replace("TOPIC", topic)
    stray.write_bytes(b"x")
    (fault,) = verify(root)
    assert (root / fault.file, fault.rule) == (stray, "file name")
    assert "is a file where directories belong; nothing reads it; move it elsewhere" in fault.detail
    assert Repair(root).plan().steps == ()
    store = MessageStore.open(root, config=config)
    assert store.queue_range(topic, 0)[1] > 0
    store.abandon()
    assert stray.read_bytes() == b"x"


@pytest.mark.parametrize("kind", ["own", "golden"])
@pytest.mark.parametrize(
    "place", ["commitlog/sub", "consumequeue/TOPIC/0/sub", "index/sub", "compaction/compactionLog"]
)
def test_a_directory_among_files_is_passed_over_as_rocketmq_does(
    own: Path, golden: Path, tmp_path: Path, kind: str, place: str
) -> None:
    template, topic, config = (own, "t", CONFIG) if kind == "own" else (golden, "RollT", GOLDEN)
    root = copy(template, tmp_path / "s")
    (root / place.replace("TOPIC", topic)).mkdir(parents=True, exist_ok=True)
    (root / place.replace("TOPIC", topic) / "note").write_bytes(b"x")
    assert verify(root) == []
    store = MessageStore.open(root, config=config)
    assert store.queue_range(topic, 0)[1] > 0
    store.abandon()


@pytest.mark.parametrize("kind", ["own", "golden"])
@pytest.mark.parametrize("number", [0, -1])
@pytest.mark.parametrize("length", [30_000, 70_000])
def test_a_log_file_of_another_length_is_named_with_what_to_do(
    own: Path, golden: Path, tmp_path: Path, kind: str, number: int, length: int
) -> None:
    root = copy(own if kind == "own" else golden, tmp_path / "s")
    path = sorted((root / "commitlog").iterdir())[number]
    with path.open("r+b") as file:
        file.truncate(length)
    (fault,) = verify(root)
    assert (root / fault.file, fault.rule) == (path, "file length")
    assert f"has {length} bytes, and files of this directory have 65536; copy" in fault.detail
    with pytest.raises(Corrupt, match=f"has {length} bytes"):
        Repair(root).plan()


def test_a_path_that_cannot_be_read_is_a_fault_and_the_rest_is_checked(
    own: Path, tmp_path: Path
) -> None:
    root = copy(own, tmp_path / "s")
    (root / "checkpoint").unlink()
    (root / "checkpoint").mkdir()
    (root / "config" / "topics.json").write_bytes(b"{")
    found = {fault.file: fault.detail for fault in verify(root)}
    assert "cannot be read: Is a directory; move it elsewhere" in found["checkpoint"]
    assert "config/topics.json" in found
