"""Damaged bytes reach no reader: flipped bits, bad sectors, files cut short during a read."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raymq.store.base.errors import Corrupt
from raymq.store.base.files import Files
from raymq.store.base.format import HALF_TOPIC, SCHEDULE_TOPIC
from raymq.store.base.rules import READABLE_RULE
from raymq.store.config.store_config import StoreConfig
from raymq.store.embedded.embedded_store import EmbeddedStore
from raymq.store.engine.message_store import MessageStore
from raymq.store.log.recovery.snapshot_head import snapshot_starts
from raymq.store.put.inner_message import InnerMessage
from raymq.store.records import record
from raymq.store.services.resolutions import Resolution
from raymq.store.services.retry import send_back
from raymq.store.tools.export import export
from raymq.store.tools.inspect import verify
from tests.support.bad_sectors import SECTOR, BadSectors
from tests.support.batches import request
from tests.support.confirming import confirm_with_index
from tests.support.damaged_store import FIRST_LOG, flip, patch
from tests.support.delays import DelayWorld
from tests.support.engine import Engine

CONFIG = StoreConfig(
    segment_size_bytes=256 * 1024,
    consume_queue_file_size_bytes=20_000,
    max_hash_slot_num=100,
    max_index_num=400,
)
COUNT = 40
BODIES = [b"pay %03d EUR " % number * 80 for number in range(COUNT)]
#: the one that rots
ROTTEN = 17


def opened(root: Path, files: Files | None = None) -> EmbeddedStore:
    return EmbeddedStore(root, config=CONFIG, files=files)


def filled(root: Path) -> Path:
    """A closed store: 40 messages with keys k0, k1, ... in queue 0 of t, and one in each of two other topics."""
    store = opened(root)
    store.create_topic("t", 1)
    store.create_topic("u", 1)
    store.put(request([b"u0"], topic="u"))
    for number, body in enumerate(BODIES):
        store.put_message(InnerMessage("t", 0, body, {"KEYS": f"k{number}"}))
    store.await_index()
    store.close()
    return root


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return filled(tmp_path_factory.mktemp("damage") / "s")


@pytest.fixture
def root(template: Path, tmp_path: Path) -> Path:
    import shutil

    return Path(shutil.copytree(template, tmp_path / "s"))


def units(store: MessageStore, topic: str = "t", queue_id: int = 0) -> list[tuple[int, int]]:
    """Place and size of each message's record."""
    queue = store.consume_queues.get(topic, queue_id)
    found = queue.read(queue.min_offset, queue.max_offset)
    return list(zip(found["position"].tolist(), found["size"].tolist(), strict=True))


def places(root: Path) -> list[tuple[int, int]]:
    store = opened(root)
    try:
        store.fetch("t", 0, 0)
        return units(store.store)
    finally:
        store.close()


def read_on(fetch: Callable[[int], Any], upto: int = COUNT) -> tuple[list[bytes], list[int]]:
    """All bodies that can be read, and the offsets of those that cannot."""
    found: list[bytes] = []
    lost: list[int] = []
    offset = 0
    while offset < upto:
        try:
            part = fetch(offset)
        except Corrupt:
            lost.append(offset)
            offset += 1
            continue
        raws = part.records.to_pylist()
        assert raws
        for raw in raws:
            found.append(record.decode(raw, [0], [len(raw)]).column("body")[0].as_py())
        offset = part.next_offset
    return found, lost


WHOLE = BODIES[:ROTTEN] + BODIES[ROTTEN + 1 :]


# --- flipped bits ---------------------------------------------------------------------------------


def test_a_flipped_bit_in_a_body_is_corrupt_and_names_file_and_offset(root: Path) -> None:
    place, _ = places(root)[ROTTEN]
    store = opened(root)
    flip(root / FIRST_LOG, place + 100)
    assert read_on(lambda offset: store.fetch("t", 0, offset)) == (WHOLE, [ROTTEN])
    with pytest.raises(Corrupt) as caught:
        store.fetch("t", 0, ROTTEN)
    assert caught.value.path == str(root / FIRST_LOG)
    assert (caught.value.offset, caught.value.rule) == (place, "bad body CRC")
    assert [error.offset for error in store.store.damage] == [place]
    store.close()


def test_no_flip_of_a_bit_brings_a_wrong_body_or_a_bug(root: Path) -> None:
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    first, last = places(root)[0][0], sum(places(root)[-1])
    path = root / FIRST_LOG
    whole = path.read_bytes()
    store = opened(root)
    for _ in range(150):
        at = chance.randrange(first, last)
        patch(path, at, bytes([whole[at] ^ 1 << chance.randrange(8)]))
        found, lost = read_on(lambda offset: store.fetch("t", 0, offset))
        missing = [body for body in BODIES if body not in found]
        assert set(found) <= set(BODIES), (seed, at)
        assert len(lost) == len(missing) <= 1, (seed, at)
        patch(path, at, whole[at : at + 1])
    store.close()


#: header places: size, magic, body length
@pytest.mark.parametrize("at", [0, 3, 4, 7, 84, 87])
def test_a_damaged_header_is_corrupt_and_no_bug(root: Path, at: int) -> None:
    place, _ = places(root)[ROTTEN]
    store = opened(root)
    flip(root / FIRST_LOG, place + at)
    assert read_on(lambda offset: store.fetch("t", 0, offset)) == (WHOLE, [ROTTEN])
    assert read_on(lambda offset: _get(store, offset)) == (WHOLE, [ROTTEN])
    store.close()


def _get(store: EmbeddedStore, offset: int) -> Any:
    """get_message as a fetch: one message, for it says nothing of those before the damage."""
    found = store.store.get_message("t", 0, offset, 1)
    return type("Found", (), {"records": found.records, "next_offset": found.next_begin_offset})


def test_queries_by_key_by_keys_by_place_and_by_id_raise_damage(root: Path) -> None:
    place, _ = places(root)[ROTTEN]
    store = opened(root)
    message_id = f"7F000001{10911:08X}{place:016X}"
    sound = store.store.query.by_id(message_id)
    assert sound.column("body").to_pylist() == [BODIES[ROTTEN]]
    flip(root / FIRST_LOG, place + 100)
    asked: list[Callable[[], object]] = [
        lambda: store.store.query.by_key("t", f"k{ROTTEN}"),
        lambda: store.store.query.by_keys("t", [f"k{ROTTEN}"]),
        lambda: store.store.query.by_keys("t", [f"k{number}" for number in range(COUNT)]),
        lambda: store.store.query.by_offset(place),
        lambda: store.store.query.by_id(message_id),
    ]
    for ask in asked:
        with pytest.raises(Corrupt) as caught:
            ask()
        assert caught.value.offset == place
    hits = store.store.query.by_keys("t", ["k1", "k2"])
    assert len(hits.records) == 2
    store.close()


def test_an_export_ends_with_the_damage_and_never_writes_it(root: Path, tmp_path: Path) -> None:
    place, _ = places(root)[ROTTEN]
    flip(root / FIRST_LOG, place + 100)
    with pytest.raises(Corrupt):
        export(root, tmp_path / "out.parquet")


def test_what_is_put_again_is_compared_before(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    appended = engine.store.put_inner([InnerMessage("t", 0, BODIES[0], {})])[0]
    half = engine.prepare(BODIES[1])
    other = engine.prepare(BODIES[2])
    engine.confirm()
    for topic in ("t", HALF_TOPIC):
        flip(tmp_path / FIRST_LOG, units(engine.store, topic)[0][0] + 100)
    end = engine.store.log.end
    with pytest.raises(Corrupt):
        send_back(engine.store, "g", "t", 0, appended.first_offset)
    with pytest.raises(Corrupt):
        engine.service.commit(half)
    assert engine.store.log.end == end
    # It does not hold up the others.
    engine.clock.advance(60_000)
    asked: list[bytes] = []

    def answer(message: Any) -> Resolution:
        asked.append(message.body)
        return Resolution.COMMIT

    assert engine.service.check(answer).committed == 1
    assert asked == [BODIES[2]]
    assert other == half + 1
    engine.confirm()
    engine.store.close()


def test_a_rotten_delayed_message_is_not_delivered_and_holds_up_no_other(tmp_path: Path) -> None:
    world = DelayWorld(tmp_path)
    for number in range(3):
        world.send(BODIES[number], level=1)
        world.send(BODIES[3 + number], delay_ms=5_000)
    world.confirm()
    world.step()
    for topic in (SCHEDULE_TOPIC, "rmq_sys_wheel_timer"):
        flip(tmp_path / FIRST_LOG, units(world.store, topic)[1][0] + 100)
    world.run_out()
    bodies = {arrived.body for arrived in world.arrived()}
    assert bodies == {BODIES[0], BODIES[2], BODIES[3], BODIES[5]}
    assert world.delays.levels.skipped == world.delays.timers.skipped == 1
    assert len(world.store.damage) == 2
    world.close()


# --- dispatch and index ---------------------------------------------------------------------------


def _lose(root: Path, *names: str) -> None:
    """Caches that a crash took, with their marks."""
    import shutil

    for name in names:
        path = root / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    (root / "abort").write_bytes(b"")


@pytest.fixture
def long_root(tmp_path: Path) -> Path:
    """A store with a snapshot after the messages, so that no start walks over them."""
    root = filled(tmp_path / "s")
    store = opened(root)
    store.put(request([b"u1"], topic="u"))
    filler = [b"y" * 10_000] * 5
    while next(snapshot_starts(store.store.log, store.store.log.end)) < places_end(store):
        store.put(request(filler))
    store.await_index()
    store.close()
    return root


def places_end(store: EmbeddedStore) -> int:
    return sum(units(store.store)[COUNT - 1])


@pytest.mark.parametrize("at", [0, 4])
def test_a_damaged_header_under_a_lost_index_ends_no_wait(long_root: Path, at: int) -> None:
    place, _ = places(long_root)[ROTTEN]
    flip(long_root / FIRST_LOG, place + at)
    _lose(long_root, "index", "raymq/index")
    store = opened(long_root)
    store.await_index()
    assert not store.store.reput.index_behind
    store.put(request([b"goes on"]))
    found = [
        number
        for number in range(COUNT)
        if len(store.store.query.by_keys("t", [f"k{number}"]).records)
    ]
    assert found == [number for number in range(COUNT) if number != ROTTEN]
    assert [error.offset for error in store.store.damage] == [place]
    store.close()


def test_consume_queues_are_rebuilt_around_damage_which_their_readers_get_as_an_error(
    long_root: Path,
) -> None:
    store = opened(long_root)
    store.fetch("t", 0, 0)
    lost_place = units(store.store, "u")[1][0]
    store.close()
    for place in (places(long_root)[ROTTEN][0], lost_place):
        flip(long_root / FIRST_LOG, place + 3)
    # The scan goes on from the snapshot, for the other queue is there; dispatch begins again.
    _lose(long_root, "consumequeue/u")
    store = opened(long_root)
    store.put(request([b"goes on"], topic="u"))
    assert read_on(lambda offset: store.fetch("u", 0, offset), 3) == ([b"u0", b"goes on"], [1])
    found, lost = read_on(lambda offset: store.fetch("t", 0, offset))
    assert (found[: COUNT - 1], lost) == (WHOLE, [ROTTEN])
    assert store.store.queue_range("u", 0) == (0, 3)
    assert [error.offset for error in store.store.damage][-1] == lost_place
    store.close()


# --- bad sectors ----------------------------------------------------------------------------------


def around(root: Path, sector: int) -> list[int]:
    """The messages that have bytes in a sector."""
    return [
        number
        for number, (place, size) in enumerate(places(root)[:COUNT])
        if place < sector + SECTOR and place + size > sector
    ]


def test_a_bad_sector_is_corrupt_at_its_offset_and_the_rest_is_read(root: Path) -> None:
    files = BadSectors()
    place, _ = places(root)[ROTTEN]
    sector = place - place % SECTOR
    gone = around(root, sector)
    store = opened(root, files)
    files.lose(root / FIRST_LOG, place)
    found, lost = read_on(lambda offset: store.fetch("t", 0, offset))
    assert lost == gone
    assert found == [body for number, body in enumerate(BODIES) if number not in gone]
    with pytest.raises(Corrupt) as caught:
        store.fetch("t", 0, gone[-1])
    assert caught.value.rule == READABLE_RULE
    assert caught.value.path == str(root / FIRST_LOG)
    assert sector <= caught.value.offset < sector + SECTOR
    with pytest.raises(Corrupt, match="cannot be read"):
        store.store.query.by_key("t", f"k{ROTTEN}")
    store.put(request([b"goes on"]))
    assert store.store.damage
    store.close()


def test_a_store_with_bad_sectors_is_opened_rebuilt_and_verified(long_root: Path) -> None:
    files = BadSectors()
    place, _ = places(long_root)[ROTTEN]
    gone = around(long_root, place - place % SECTOR)
    first = places(long_root)[gone[0]][0]
    files.lose(long_root / FIRST_LOG, place)
    fault = verify(long_root, files)[0]
    assert (fault.file, fault.offset, fault.rule) == (FIRST_LOG, first, "recovery row U")
    _lose(long_root, "consumequeue/u", "index", "raymq/index")
    store = opened(long_root, files)
    store.await_index()
    found, lost = read_on(lambda offset: store.fetch("t", 0, offset))
    assert lost == gone
    assert found[: COUNT - len(gone)] == [b for n, b in enumerate(BODIES) if n not in gone]
    store.close()


@pytest.mark.parametrize("what", ["consumequeue/t/0", "index"])
def test_a_bad_sector_of_a_cache_is_an_error_and_no_signal(root: Path, what: str) -> None:
    files = BadSectors()
    store = opened(root, files)
    store.fetch("t", 0, 0)
    (path,) = (root / what).iterdir()
    files.lose(path, 0)
    asked: dict[str, Callable[[], object]] = {
        "index": lambda: store.store.query.by_key("t", "k1"),
        "consumequeue/t/0": lambda: store.fetch("t", 0, 0),
    }
    with pytest.raises(Corrupt) as caught:
        asked[what]()
    assert caught.value.path == str(path)
    assert any(fault.file.startswith(what) for fault in verify(root, files))
    store.put(request([b"goes on"]))
    store.abandon()


READER = """
    import json, os, sys
    from pathlib import Path
    from raymq.store.config.store_config import StoreConfig
    from raymq.store.embedded.embedded_store import EmbeddedStore
    from raymq.store.base.errors import Corrupt

    root = Path(sys.argv[1])
    options = json.loads(sys.argv[2])
    store = EmbeddedStore(root, config=StoreConfig(**options))
    store.fetch("t", 0, 0)
    store.store.query.by_key("t", "k1")
    log = root / "commitlog" / ("0" * 20)
    os.truncate(log, 4096)
    reported = []
    for ask in (
        lambda: store.fetch("t", 0, 39),
        lambda: store.store.query.by_key("t", "k39"),
        lambda: store.store.get_message("t", 0, 39, 1),
    ):
        try:
            ask()
        except Corrupt as error:
            reported.append(error.fields["rule"])
    print(json.dumps(reported))
    sys.stdout.flush()
    os._exit(0)
"""


def test_a_file_that_is_cut_short_under_its_reader_ends_no_process(root: Path) -> None:
    # As a bad sector it is a SIGBUS through a map: the process would die of signal 7.
    options = {
        name: getattr(CONFIG, name)
        for name in (
            "segment_size_bytes",
            "consume_queue_file_size_bytes",
            "max_hash_slot_num",
            "max_index_num",
        )
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(READER), str(root), json.dumps(options)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [READABLE_RULE] * 3


def test_places_are_read_together_and_come_apart_again(root: Path) -> None:
    store = opened(root)
    chosen = np.array([0, 1, 5, 30, 39])
    found = np.array(units(store.store))[chosen]
    data, starts, sizes = store.store.log.reads.records(found[:, 0], found[:, 1])
    bodies = record.decode(data, starts, sizes).column("body").to_pylist()
    assert bodies == [BODIES[number] for number in chosen]
    confirm_with_index(store.store)
    store.close()
