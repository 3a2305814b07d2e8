"""Repair shows what it would do, keeps what it changes, and leaves a store that `verify` calls sound."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from raymq.store.base.errors import Corrupt, Rejected, Unavailable
from raymq.store.base.failpoints import FailPointReached, failpoint
from raymq.store.base.format import SCHEDULE_TOPIC
from raymq.store.config.delay_levels import DEFAULT_LEVELS_MS
from raymq.store.config_files import fastjson
from raymq.store.embedded.embedded_store import EmbeddedStore
from raymq.store.groups.leases.entries import SettleOutcome
from raymq.store.groups.leases.requests import (
    LeaseRequest,
    SettleItem,
    SettleRequest,
    offsets_of,
)
from raymq.store.log.chain import CHAIN_UNIT_BYTES, unpack_units
from raymq.store.state.shard_state import INTERNAL_TOPIC
from raymq.store.tools.inspect import verify
from raymq.store.tools.repair import Repair
from tests.support.batches import request
from tests.support.damaged_store import (
    CONFIG,
    FIRST_LOG,
    bodies,
    copy,
    flip,
    patch,
    tree,
)
from tests.support.delays import CONFIG as CONFIG_OF_DELAYS
from tests.support.delays import DelayWorld

QUEUE = "consumequeue/t/1/00000000000000000000"
CHAIN = "raymq/chain/00000000000000000000"
INDEX = "index/20261121023720699"


def lose_queue(root: Path) -> None:
    shutil.rmtree(root / "consumequeue/t/1")


def shorten_queue(root: Path) -> None:
    (root / QUEUE).write_bytes((root / QUEUE).read_bytes()[:700])


#: part of the store -> damage, by hand
OF_OURS: dict[str, Callable[[Path], None]] = {
    "a unit": lambda root: flip(root / QUEUE, 33 * 20 + 7),
    "a lost unit": lambda root: patch(root / QUEUE, 33 * 20, bytes(20)),
    "a lost queue": lose_queue,
    "a short queue file": shorten_queue,
    "the chain's end": lambda root: (root / CHAIN).write_bytes((root / CHAIN).read_bytes()[:-40]),
    "a chain unit": lambda root: flip(root / CHAIN, 9 * CHAIN_UNIT_BYTES + 30),
    "the CRC in a chain unit": lambda root: flip(root / CHAIN, 9 * CHAIN_UNIT_BYTES + 25),
    "the checkpoint": lambda root: patch(root / "checkpoint", 0, struct.pack(">q", 1 << 60)),
    "the marks": lambda root: patch(root / "raymq/marks", 24, struct.pack("=q", -5)),
}


@pytest.mark.parametrize("damage", list(OF_OURS))
def test_what_the_log_can_make_again_is_made_again(own: Path, tmp_path: Path, damage: str) -> None:
    root = copy(own, tmp_path / "s")
    OF_OURS[damage](root)
    damaged = tree(root)
    plan = Repair(root).plan()
    assert tree(root) == damaged, "a plan changes nothing"
    assert plan.faults
    assert plan.steps
    done = Repair(root).run()
    assert done.faults == verify(root) == []
    assert done.kept is not None
    after = tree(root)
    for name, data in damaged.items():
        kept = done.kept / name
        assert after.get(name) == data or kept.read_bytes() == data, f"{name} is not kept"
    for topic, queue in (("t", 0), ("t", 1), ("u", 0)):
        assert bodies(root, topic, queue) == [
            b"%03d-%02d " % (batch, i) * 30 for batch in range(12) for i in range(10)
        ]
    assert verify(root) == []


def test_the_queue_of_a_delay_level_is_made_again_with_the_delays_of_its_store(
    tmp_path: Path,
) -> None:
    world = DelayWorld(tmp_path / "s")
    assert CONFIG_OF_DELAYS.delay_levels_ms[3] != DEFAULT_LEVELS_MS[3]
    world.store.topics.create("t", 1, [0])
    world.send(b"later", level=4)
    world.close()
    queue = f"consumequeue/{SCHEDULE_TOPIC}/3/{0:020d}"
    before = tree(world.root)[queue]
    patch(world.root / queue, 0, bytes(20))
    done = Repair(world.root).run()
    assert [step.part for step in done.steps] == ["consumequeue"]
    assert tree(world.root)[queue] == before


def test_what_is_made_again_of_a_store_of_rocketmq_is_byte_for_byte_its_own(
    golden: Path, tmp_path: Path
) -> None:
    root = copy(golden, tmp_path / "s")
    before = tree(root)
    for file in (root / "consumequeue").rglob("0*0"):
        if file.is_file():
            patch(file, 0, struct.pack(">qiq", 5, 5, 5))
    flip(root / INDEX, 40 + 400 + 7 * 20)
    patch(root / "checkpoint", 0, struct.pack(">q", -1))
    done = Repair(root).run()
    assert [step.part for step in done.steps] == ["consumequeue", "index", "checkpoint"]
    assert done.faults == []
    after = tree(root)
    for name, data in before.items():
        if name.startswith("consumequeue"):
            assert after[name] == data
    # Its name is the time of its first record. RocketMQ's was that of its creation, 30 ms later.
    (made,) = (data for name, data in after.items() if name.startswith("index/"))
    assert made == before[INDEX]
    assert after["commitlog/00000000000000000000"] == before["commitlog/00000000000000000000"]


def test_config_comes_from_its_backup_or_from_the_log(own: Path, tmp_path: Path) -> None:
    root = copy(own, tmp_path / "s")
    store = EmbeddedStore(root, config=CONFIG)
    store.wait(store.store.commit_offsets("g", "t", {0: 7, 1: 9}))
    store.fetch("t", 0, 0)
    store.close()
    shutil.rmtree(root / "config")
    (root / "config").mkdir()
    for name in ("topics.json", "consumerOffset.json", "delayOffset.json", "consumerFilter.json"):
        (root / "config" / name).write_text("{broken")
    (root / "config" / "delayOffset.json.bak").write_text('{"offsetTable":{3:2}}')
    done = Repair(root).run()
    assert done.faults == []
    topics = fastjson.loads((root / "config" / "topics.json").read_text())["topicConfigTable"]
    assert topics["t"]["readQueueNums"] == 2
    assert topics[INTERNAL_TOPIC]["perm"] == 0, (
        "RocketMQ sweeps away the queue of a topic it knows not"
    )
    offsets = fastjson.loads((root / "config" / "consumerOffset.json").read_text())["offsetTable"]
    assert offsets == {"t@g": {0: 7, 1: 9}}
    assert (root / "config" / "delayOffset.json").read_text() == '{"offsetTable":{3:2}}'
    assert not (root / "config" / "consumerFilter.json").exists()


def test_offsets_of_workers_come_from_the_log(own: Path, tmp_path: Path) -> None:
    root = copy(own, tmp_path / "s")
    store = EmbeddedStore(root, config=CONFIG)
    key = ("t", 0)
    first, _ = store.store.queue_range(*key)
    leased = store.lease("g", LeaseRequest(b"s", 1, 2), [key])
    assert leased is not None
    item = SettleItem(leased.number, key, offsets_of([first, first + 1]), SettleOutcome.ACKED)
    store.settle("g", SettleRequest(b"s", 1, [item]))
    store.close()
    for path in (root / "config").iterdir():
        path.unlink()
    (root / "config" / "consumerOffset.json").write_text("{broken")
    assert Repair(root).run().faults == []
    offsets = fastjson.loads((root / "config" / "consumerOffset.json").read_text())["offsetTable"]
    assert offsets == {"t@g": {0: first + 2}}


def test_deleted_topics_are_not_in_a_rebuilt_file(own: Path, tmp_path: Path) -> None:
    root = copy(own, tmp_path / "s")
    store = EmbeddedStore(root, config=CONFIG)
    for name in ("gone", "again"):
        store.create_topic(name, queues=4)
        store.put(request([b"x"], topic=name, queue=3))
        store.store.topics.delete(name)
    store.create_topic("again", queues=2)
    store.close()
    for path in (root / "config").iterdir():
        path.unlink()
    (root / "config" / "topics.json").write_text("{broken")
    assert Repair(root).run().faults == []
    topics = fastjson.loads((root / "config" / "topics.json").read_text())["topicConfigTable"]
    assert "gone" not in topics
    assert topics["again"]["readQueueNums"] == 2
    assert topics["t"]["readQueueNums"] == 2


def test_a_sound_store_is_left_alone(own: Path, tmp_path: Path) -> None:
    root = copy(own, tmp_path / "s")
    before = tree(root)
    done = Repair(root).run()
    assert (done.steps, done.kept, done.faults) == ((), None, [])
    assert tree(root) == before


def test_parts_are_made_again_on_demand(own: Path, tmp_path: Path) -> None:
    root = copy(own, tmp_path / "s")
    before = tree(root)
    done = Repair(root, rebuild=["chain", "consumequeue", "marks", "checkpoint"]).run()
    assert done.faults == []
    after = tree(root)
    for name, data in before.items():
        if name.startswith(("consumequeue", "commitlog")):
            assert after[name] == data
    with pytest.raises(Rejected, match="cannot be rebuilt"):
        Repair(root, rebuild=["commitlog"])


# --- cuts -----------------------------------------------------------------------------------------


def damaged_in_the_middle(own: Path, root: Path) -> tuple[Path, int, bytes]:
    """Rot in the header of the 20th append unit."""
    copy(own, root)
    unit = unpack_units((root / CHAIN).read_bytes())[20]
    flip(root / FIRST_LOG, unit.start + 40)
    return root, unit.start, (root / FIRST_LOG).read_bytes()


def test_damage_of_the_log_is_cut_only_where_the_operator_says(own: Path, tmp_path: Path) -> None:
    root, start, _ = damaged_in_the_middle(own, tmp_path / "s")
    before = tree(root)
    plan = Repair(root).plan()
    assert plan.steps == ()
    assert plan.needs_truncation is not None
    assert plan.needs_truncation.offset == start
    done = Repair(root).run()
    assert done.needs_truncation == plan.needs_truncation
    assert done.faults
    assert tree(root) == before


def test_a_store_that_a_start_refuses_is_opened_again_by_a_cut(own: Path, tmp_path: Path) -> None:
    root = copy(own, tmp_path / "s")
    units = unpack_units(sorted((root / "raymq/chain").iterdir())[-1].read_bytes())
    last = sorted((root / "commitlog").iterdir())[-1]
    flip(last, units[4].start - int(last.name) + 40)
    with pytest.raises(Corrupt):
        EmbeddedStore(root, config=CONFIG)
    assert Repair(root, truncate_at=units[4].start).run().faults == []
    assert bodies(root, "t", 0)


def test_a_cut_says_what_it_loses_keeps_it_and_leaves_a_sound_store(
    own: Path, tmp_path: Path
) -> None:
    root, start, damaged = damaged_in_the_middle(own, tmp_path / "s")
    job = Repair(root, truncate_at=start, keep=tmp_path / "kept")
    plan = job.plan()
    assert plan.truncation is not None
    lost = {(item.topic, item.queue_id): item for item in plan.truncation.lost}
    whole = {
        key: len(bodies(copy(own, tmp_path / f"w{key[1]}{key[0]}"), *key))
        for key in (("t", 0), ("t", 1), ("u", 0))
    }
    done = job.run()
    assert done.faults == verify(root) == []
    left = {key: bodies(root, *key) for key in whole}
    # Of the damaged unit's ten messages nine can be read.
    assert sum(map(len, left.values())) + sum(
        item.messages for key, item in lost.items() if key in whole
    ) in (359, 360)
    for key, count in whole.items():
        assert len(left[key]) <= lost[key].first
        assert lost[key].last == count - 1
    kept = (tmp_path / "kept" / "commitlog" / f"{start:020d}.cut").read_bytes()
    assert damaged[start:].startswith(kept)
    assert not damaged[start + len(kept) :].strip(b"\0")
    later = sorted(p.name for p in (tmp_path / "kept" / "commitlog").iterdir())
    assert len(later) == len(list((own / "commitlog").iterdir()))
    # Cut records never come back, whatever is appended.
    store = EmbeddedStore(root, config=CONFIG)
    store.put(request([b"new"], topic="t", queue=1))
    store.fetch("t", 1, len(left["t", 1]))
    store.close()
    assert bodies(root, "t", 1) == [*left["t", 1], b"new"]
    assert verify(root) == []


def test_a_cut_of_a_store_of_rocketmq_takes_index_entries_and_units_along(
    golden: Path, tmp_path: Path
) -> None:
    root = copy(golden, tmp_path / "s")
    file = root / "commitlog/00000000000000065536"
    flip(file, 2000)
    plan = Repair(root).plan()
    assert plan.needs_truncation is not None
    assert plan.needs_truncation.unreadable
    done = Repair(root, truncate_at=plan.needs_truncation.offset).run()
    assert done.faults == []
    assert "index" in {step.part for step in done.steps}


def test_a_cut_counts_the_bytes_of_files_that_are_gone(own: Path, tmp_path: Path) -> None:
    root = copy(own, tmp_path / "s")
    end = len((root / FIRST_LOG).read_bytes())
    appended = struct.unpack_from("=q", (root / "raymq/marks").read_bytes())[0]
    for path in (root / "commitlog").iterdir():
        if path.name != FIRST_LOG.rpartition("/")[2]:
            path.unlink()
    cut = Repair(root).plan().needs_truncation
    assert cut is not None
    assert f"{appended - end} bytes that cannot be read" in str(cut)


def test_a_cut_is_refused_where_none_is_needed_or_no_record_starts(
    own: Path, tmp_path: Path
) -> None:
    with pytest.raises(Rejected, match="would open this log"):
        Repair(own, truncate_at=0).plan()
    root, start, _ = damaged_in_the_middle(own, tmp_path / "s")
    for offset in (start + 1, start + 5000, 17):
        with pytest.raises(Rejected, match="no record starts"):
            Repair(root, truncate_at=offset).plan()


# --- care -----------------------------------------------------------------------------------------


def test_an_open_store_is_not_repaired(own: Path, tmp_path: Path) -> None:
    root = copy(own, tmp_path / "s")
    store = EmbeddedStore(root, config=CONFIG)
    with pytest.raises(Unavailable, match="already open"):
        Repair(root, rebuild=["chain"]).run()
    store.close()


def test_copies_go_to_an_empty_directory_only(own: Path, tmp_path: Path) -> None:
    root = copy(own, tmp_path / "s")
    flip(root / QUEUE, 33 * 20 + 7)
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "x").write_text("of another repair")
    with pytest.raises(Rejected, match="not empty"):
        Repair(root, keep=tmp_path / "kept").run()


@pytest.mark.parametrize("point", ["repair.planned", "repair.between_renames", "repair.done"])
def test_a_repair_that_dies_is_run_again(own: Path, tmp_path: Path, point: str) -> None:
    root = copy(own, tmp_path / "s")
    flip(root / QUEUE, 33 * 20 + 7)
    flip(root / CHAIN, 9 * CHAIN_UNIT_BYTES + 30)
    with failpoint(point, "raise"), pytest.raises(FailPointReached):
        Repair(root).run()
    done = Repair(root).run()
    assert done.faults == verify(root) == []
    assert len(bodies(root, "t", 1)) == 120


@pytest.mark.parametrize("point", ["repair.kept", "repair.cut_after_zero"])
def test_a_cut_that_dies_is_finished_by_the_next_start_or_repair(
    own: Path, tmp_path: Path, point: str
) -> None:
    for again in (True, False):
        root, start, _ = damaged_in_the_middle(own, tmp_path / str(again))
        with failpoint(point, "raise"), pytest.raises(FailPointReached):
            Repair(root, truncate_at=start).run()
        if point == "repair.kept":
            # Nothing was changed yet.
            assert Repair(root).plan().needs_truncation is not None
            Repair(root, truncate_at=start).run()
        elif again:
            assert Repair(root).run().faults == []
        assert len(bodies(root, "t", 0)) > 0
        assert verify(root) == []
