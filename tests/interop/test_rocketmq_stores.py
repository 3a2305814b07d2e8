"""We open what RocketMQ wrote, and RocketMQ what both wrote in turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from raymq.store.config.store_config import StoreConfig
from raymq.store.engine.message_store import MessageStore
from raymq.store.tools.inspect import check
from tests.support import message_kinds as kinds
from tests.support.confirming import confirm_with_index
from tests.support.oracle import Line, RocketMQ
from tests.support.put_kinds import put_all
from tests.support.store_facts import assert_same, read_copy


def every_kind() -> list[kinds.Kind]:
    later = [*kinds.delayed(), *kinds.timed(int(time.time() * 1000))]
    return [*kinds.ordinary(), *kinds.special(), *later, *kinds.doubled(), *kinds.rolling()]


def put_ours(root: Path, config: StoreConfig, messages: list[kinds.Kind], *, crash: bool) -> None:
    """RayMQ appends to the store, whichever engine wrote it."""
    store = MessageStore.open(root, config=config)
    put_all(store, messages)
    confirm_with_index(store)
    if crash:
        store.abandon()
    else:
        store.close()


def stored(lines: list[Line]) -> int:
    return sum(line["kind"] == "record" for line in lines)


@pytest.mark.parametrize("end", ["shut down", "halted"])
def test_we_read_all_that_rocketmq_wrote_and_rocketmq_what_we_appended(
    rocketmq: RocketMQ, config: StoreConfig, tmp_path: Path, end: str
) -> None:
    root = tmp_path / "store"
    write: Callable[..., list[Line]]
    write = rocketmq.write if end == "shut down" else rocketmq.write_and_halt
    answers = write(root, every_kind(), timers=True)
    assert {answer["status"] for answer in answers} == {"PUT_OK"}
    assert (root / "abort").exists() == (end == "halted")
    theirs = rocketmq.read(root)
    assert_same(read_copy(root, config), theirs)
    count = sum(answer["count"] for answer in answers)
    assert stored(theirs) == count
    assert len(list((root / "commitlog").iterdir())) >= 3

    more = kinds.ordinary()
    put_ours(root, config, more, crash=end == "halted")
    both = rocketmq.read(root)
    assert_same(read_copy(root, config), both)
    assert stored(both) > count + len(more)


@pytest.mark.parametrize("end", ["shut down", "running"])
def test_we_find_keys_in_all_of_rocketmqs_index_files(
    rocketmq: RocketMQ, config: StoreConfig, tmp_path: Path, end: str
) -> None:
    root = tmp_path / "store"
    small = StoreConfig(**{**vars(config), "max_hash_slot_num": 20, "max_index_num": 60})
    theirs = rocketmq.resized(slots=20, entries=60)
    write = theirs.write if end == "shut down" else theirs.write_and_leave
    write(root, [*kinds.rolling(), *[*kinds.ordinary(), *kinds.special()] * 3])
    assert len(list((root / "index").iterdir())) >= 2
    # Slots and entries have not the usual ratio, and the first key is of the record at 0.
    assert check(root).faults == []
    may_lack = end == "running"
    assert_same(read_copy(root, small), theirs.read(root), may_lack_keys=may_lack)
    put_ours(root, small, [*kinds.ordinary(), *kinds.rolling()], crash=may_lack)
    assert_same(read_copy(root, small), theirs.read(root), may_lack_keys=may_lack)


def test_we_see_what_is_left_when_rocketmq_deleted_old_files(
    rocketmq: RocketMQ, config: StoreConfig, tmp_path: Path
) -> None:
    root = tmp_path / "store"
    messages = [*kinds.ordinary(), *kinds.special(), *kinds.rolling(), {"action": "delete"}]
    *_, done = rocketmq.write_and_leave(root, messages)
    assert done["deleted"] >= 2
    theirs = rocketmq.read(root)
    assert_same(read_copy(root, config), theirs, times=False)
    assert any(line["kind"] == "queue" and line["min"] > 0 for line in theirs)
    put_ours(root, config, kinds.ordinary(), crash=False)
    assert_same(read_copy(root, config), rocketmq.read(root), times=False)


def test_both_write_in_turn(rocketmq: RocketMQ, config: StoreConfig, tmp_path: Path) -> None:
    root = tmp_path / "store"
    put_ours(root, config, kinds.ordinary(), crash=False)
    counts = []
    for turn, write in enumerate((rocketmq.write, rocketmq.write_and_leave)):
        write(root, [*kinds.special(), *kinds.rolling(12)])
        assert check(root).faults == []
        both = rocketmq.read(root)
        assert_same(read_copy(root, config), both)
        counts.append(stored(both))
        put_ours(root, config, [*kinds.ordinary(), *kinds.rolling(9)], crash=turn == 1)
        both = rocketmq.read(root)
        assert_same(read_copy(root, config), both)
        counts.append(stored(both))
    assert counts == sorted(set(counts))


def test_rocketmq_brings_back_what_it_cut_away_and_we_read_what_it_reads(
    rocketmq: RocketMQ, config: StoreConfig, tmp_path: Path
) -> None:
    """Why every cut of RayMQ zeroes the bytes after it (test_our_stores.py has the same story with our engine)."""
    root = tmp_path / "store"
    answers = rocketmq.write_and_halt(
        root, [kinds.kind(b) for b in (b"first ", b"second", b"third ")]
    )
    second = answers[1]["phy"]
    with (root / "commitlog" / f"{0:020d}").open("r+b") as file:
        file.seek(second + 4)
        file.write(bytes(4))
    # Its recovery cuts the log before the second message; the new one is as long as that was.
    (fourth,) = rocketmq.write_and_leave(root, [kinds.kind(b"fourth")])
    assert fourth["phy"] == second
    lines = rocketmq.read(root)
    # The record that came back is older than the record before it.
    assert_same(read_copy(root, config), lines, times=False)
    assert [line["position"] for line in lines if line["kind"] == "unit"] == [
        answers[0]["phy"],
        second,
        answers[2]["phy"],
    ]


@pytest.mark.thorough
def test_what_rocketmq_cut_and_did_not_erase_is_gone_after_our_start(
    rocketmq: RocketMQ, config: StoreConfig, tmp_path: Path
) -> None:
    root = tmp_path / "store"
    bodies = (b"first", b"second" * 50, b"third")
    answers = rocketmq.write_and_halt(root, [kinds.kind(body) for body in bodies])
    second, third = answers[1]["phy"], answers[2]["phy"]
    log = root / "commitlog" / f"{0:020d}"
    with log.open("r+b") as file:
        file.seek(second + 4)
        file.write(bytes(4))
    # Its recovery cuts the log before the second message. It stops in order, after two shorter ones in that place,
    # whose units replace those of the messages that are gone.
    fourth, _ = rocketmq.write(root, [kinds.kind(b"fourth"), kinds.kind(b"fifth")])
    assert fourth["phy"] == second
    assert not (root / "abort").exists()
    assert log.read_bytes()[third + 4 : third + 8] != bytes(4)
    store = MessageStore.open(root, config=config)
    end = store.log.end
    assert second < end < third
    confirm_with_index(store)
    store.close()
    assert not any(log.read_bytes()[end:])
    assert check(root).faults == []
    put_ours(root, config, kinds.ordinary(), crash=False)
    lines = rocketmq.read(root)
    assert_same(read_copy(root, config), lines)
    lengths = [line["bodyLength"] for line in lines if line["kind"] == "record"]
    assert lengths[:3] == [len(b"first"), len(b"fourth"), len(b"fifth")]
