"""Every place where a machine or a process can stop, and real recovery of what is left.

A trace of one store is replayed by `crash_states.py` into the disks that a power loss or SIGKILL
may leave. Each must open, and keep what was promised before the crash: after a power loss what was
synced, after a kill every put that returned. Deterministic: traces and samples follow from SEED.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from raymq.store import record, rows
from raymq.store.commit_log import CommitLog
from raymq.store.config import StoreConfig
from raymq.store.failpoints import FailPointReached, failpoint
from raymq.store.inspect import check as inspect_store
from raymq.store.message_store import MessageStore
from raymq.store.put import PutRequest
from raymq.store.segment_head import read_head
from raymq.store.state import INTERNAL_TOPIC
from tests.support.batches import batch, request
from tests.support.clock import ManualClock
from tests.support.crash_states import disk_of
from tests.support.simulated_disk import SimulatedDisk

SEED = 20
ROOT = Path("/s")
CONFIG = StoreConfig(
    segment_size_bytes=16 * 1024,
    consume_queue_file_size_bytes=400,
    max_message_bytes=2000,
    prewrite_window_bytes=8 * 1024,
    max_hash_slot_num=16,
    max_index_num=40,
)
#: combinations tried at each place of a trace
LIMIT = 40
#: every how many-th distinct state is recovered
STRIDE = 21
#: every how many-th recovery `verify` is asked what it will do
VERIFY_STRIDE = 3
#: topics of a state that needs three SNAPSHOT records
TOPICS = tuple(f"topic-{number:02d}-{'x' * 60}" for number in range(38))
Queue = tuple[str, int]


class Batch(NamedTuple):
    """One acknowledged idempotent batch."""

    queue: int
    producer: int
    sequence: int
    first_offset: int
    bodies: tuple[bytes, ...]


class Promise(NamedTuple):
    """What callers were told: records of each queue, and the newest batch of each producer."""

    returned: tuple[tuple[int, int], ...]
    returned_batches: tuple[Batch, ...]
    acked: tuple[tuple[int, int], ...]
    acked_batches: tuple[Batch, ...]


NOTHING = Promise((), (), (), ())


class Trace:
    """A recorded disk, what was ever put on it, and a store that is being driven."""

    def __init__(self, block_bytes: int, *, record: bool = True, salt: int = 0) -> None:
        self.disk = SimulatedDisk(block_bytes=block_bytes, record=record)
        self.chance = random.Random(SEED + salt)
        #: bodies that were ever put at (queue, offset)
        self.put_at: dict[tuple[int, int], set[bytes]] = {}
        self.ends: dict[int, int] = {}
        self.sequences: dict[int, int] = {}
        #: of every record that is put
        self.properties: bytes | None = None
        self.batches: dict[int, Batch] = {}
        self.acked: tuple[tuple[int, int], ...] = ()
        self.acked_batches: tuple[Batch, ...] = ()
        #: topics that the disk has from the beginning
        self.topics: tuple[str, ...] = ()
        self.store: MessageStore

    def open(self) -> None:
        self.store = open_store(self.disk)
        if "t" not in self.store.state.topics:
            self.store.create_topic("t", 2, [0])
            self.ends = {0: 0, 1: 0}
            self.ack()

    def begin_with_topics(self) -> None:
        """Start from a disk that holds TOPICS, and a snapshot of them of three parts."""
        disk = SimulatedDisk(block_bytes=self.disk.block_bytes, record=False)
        store = open_store(disk)
        for name in TOPICS:
            store.create_topic(name, 4, [0])
        store.create_topic("t", 2, [0])
        # Nothing of these is a promise: queue offsets are counted from here.
        store.log.sync()
        store.log.note_confirmed(store.log.end)
        store.close()
        parts = store.state.snapshot(min(1 << 20, CONFIG.segment_size_bytes // 8))
        assert len(parts) == 3
        tree = disk.tree()
        self.disk = disk_of(tree, boot=0, block_bytes=self.disk.block_bytes).recording()
        self.topics = (*TOPICS, "t")
        self.ends = {0: 0, 1: 0}

    def note(self) -> None:
        returned, batches = tuple(self.ends.items()), tuple(self.batches.values())
        self.disk.note(Promise(returned, batches, self.acked, self.acked_batches))

    def put(self, queue: int, rows: int, size: int, *, producer: int | None = None) -> None:
        bodies = tuple(self.chance.randbytes(size) for _ in range(rows))
        offset = self.ends[queue]
        for row, body in enumerate(bodies):
            self.put_at.setdefault((queue, offset + row), set()).add(body)
        sequence = self.sequences.get(queue, 0)
        # The producer's number is its queue's: each has one stream of sequences.
        who = None if producer is None else producer + queue
        values = batch([*bodies], tag="x", properties=self.properties)
        made = self.store.put(PutRequest("t", queue, values, who, 0, sequence, "quorum"))
        assert made.first_offset == offset
        self.ends[queue] += rows
        if who is not None:
            self.sequences[queue] = sequence + rows
            self.batches[queue] = Batch(queue, who, sequence, offset, bodies)
        self.note()

    def ack(self) -> None:
        """Sync, confirm, promise, dispatch: what the host does for a group of puts."""
        self.store.log.sync()
        self.promise_all()
        self.store.log.note_confirmed(self.store.log.synced)
        dispatch_all(self.store)

    def promise_all(self) -> None:
        self.acked = tuple(self.ends.items())
        self.acked_batches = tuple(self.batches.values())
        self.note()


def open_store(disk: SimulatedDisk) -> MessageStore:
    return MessageStore.open(ROOT, config=CONFIG, files=disk, clock=ManualClock())


def dispatch_all(store: MessageStore) -> None:
    while store.dispatched < store.log.confirmed:
        before = store.dispatched
        assert store.dispatch(store.log.confirmed) > before


# --- traces -------------------------------------------------------------------------------------


def appends(width: int) -> Trace:
    """Puts of one to four rows on two queues, acknowledged in groups, in one segment."""
    trace = Trace(width, salt=1)
    trace.open()
    for turn in range(16):
        trace.put(turn % 2, 1 + turn % 3, 150 + 37 * turn % 300)
        if turn % 3 == 2:
            trace.ack()
    return trace


def large_properties(width: int) -> Trace:
    """Records that are mostly properties, which no CRC of RocketMQ's covers."""
    trace = Trace(width, salt=9)
    trace.properties = b"note\x01" + b"text " * 200 + b"\x02"
    trace.open()
    for turn in range(12):
        trace.put(turn % 2, 1 + turn % 2, 40)
        if turn % 4 == 3:
            trace.ack()
    return trace


def rolls(width: int) -> Trace:
    """Large puts over four segments, batches that straddle the roll, few acks."""
    trace = Trace(width, salt=2)
    trace.open()
    for turn in range(22):
        trace.put(turn % 2, 2, 900 + 11 * turn)
        if turn % 4 == 3:
            trace.ack()
    return trace


def checkpoints(width: int) -> Trace:
    """Consume queues synced between puts: their files roll every 20 records."""
    trace = Trace(width, salt=3)
    trace.open()
    for turn in range(18):
        trace.put(turn % 2, 5, 60)
        if turn % 2:
            trace.ack()
        if turn % 3 == 2:
            trace.store.sync_queues()
            trace.store.log.checkpoint.physic_ms = trace.store.state.store_time_ms
            trace.store.log.checkpoint.sync()
    return trace


def snapshots(width: int) -> Trace:
    """Idempotent producers and committed offsets over rolls: state comes back from snapshots."""
    trace = Trace(width, salt=4)
    trace.open()
    for turn in range(24):
        trace.put(turn % 2, 2, 700, producer=70)
        if turn % 5 == 4:
            trace.store.commit_offsets("g", "t", {0: turn})
        if turn % 3 == 2:
            trace.ack()
        if turn == 11:
            trace.store.sync_queues()
    return trace


def truncations(width: int) -> Trace:
    """A follower takes a tail that is cut above C and replaced by other records, twice.

    C stands two puts below what both leaders have: one cut is above it, one at it, none below.
    """
    trace = Trace(width, salt=5)
    log = CommitLog(ROOT, CONFIG, files=trace.disk, clock=ManualClock())
    log.recover(0)
    for turn in range(2):
        for salt in (6, 7):
            leader = _leader(width, shared=7 * (turn + 1), salt=salt, tail=6 - turn)
            for key, bodies in leader.put_at.items():
                trace.put_at.setdefault(key, set()).update(bodies)
            _follow(trace, log, leader)
            if salt == 6:
                confirmed = _leader(width, shared=7 * (turn + 1) - 2, salt=salt, tail=0)
                log.note_confirmed(confirmed.store.log.end)
                both = _leader(width, shared=7 * (turn + 1), salt=salt, tail=0)
                _cut(trace, log, both)
                assert log.confirmed < log.end
        if turn == 0:
            # The next leader has no more of the last one's tail than what was confirmed.
            _cut(trace, log, confirmed)
            assert log.confirmed == log.end
    return trace


def _cut(trace: Trace, log: CommitLog, left: Trace) -> None:
    """Cut a follower to what `left` has. What the follower promised of the rest falls before."""
    trace.ends, trace.batches = dict(left.ends), dict(left.batches)
    trace.promise_all()
    assert left.store.log.end >= log.confirmed, "a follower never cuts below its C"
    log.truncate(left.store.log.end)


def _leader(width: int, *, shared: int, salt: int, tail: int) -> Trace:
    """A store with `shared` puts that are the same for every salt, then `tail` of its own."""
    trace = Trace(width, record=False, salt=5)
    trace.open()
    for turn in range(shared):
        trace.put(turn % 2, 2, 500, producer=70)
    trace.chance = random.Random(SEED + salt)
    for turn in range(tail):
        trace.put(turn % 2, 2 + salt % 2, 400 + 50 * salt, producer=70)
    return trace


def _follow(trace: Trace, log: CommitLog, leader: Trace) -> None:
    """Append the leader's units one by one; sync after every third and at the end."""
    source = leader.store.log
    units = [u for u in source.chain.units(source.start, source.end) if u.start >= log.end]
    for number, unit in enumerate(units):
        view, base = source.view(unit.start)
        log.append_units([unit], memoryview(view[unit.start - base : unit.end - base]))
        if number % 3 == 2:
            log.sync()
    log.sync()
    trace.ends, trace.batches = dict(leader.ends), dict(leader.batches)
    trace.promise_all()


def clean_closes(width: int) -> Trace:
    """Orderly stops and starts, with a roll between them."""
    trace = Trace(width, salt=8)
    for life in range(4):
        trace.open()
        for turn in range(5):
            trace.put(turn % 2, 2, 300 + 100 * life, producer=70)
            if turn == 3:
                trace.ack()
        trace.ack()
        trace.store.close()
        trace.note()
    return trace


def large_snapshots(width: int) -> Trace:
    """Rolls with a state that needs three SNAPSHOT records; some are synced and confirmed between them.

    The host publishes the log's end without the put lock, so the flusher may sync half a snapshot.
    """
    trace = Trace(width, salt=10)
    trace.begin_with_topics()
    trace.open()
    units = itertools.count()

    def confirm_often() -> None:
        if next(units) % 3 == 1:
            trace.store.log.sync()
            trace.store.log.note_confirmed(trace.store.log.synced)

    with failpoint("log.after_store", confirm_often):
        for turn in range(20):
            trace.put(turn % 2, 1, 1300, producer=70)
            if turn % 4 == 3:
                trace.ack()
    return trace


def broken_snapshots(width: int) -> Trace:
    """The process ends behind a seal and behind each part of a snapshot; all of it was synced."""
    trace = Trace(width, salt=11)
    trace.begin_with_topics()
    for parts in (1, 2, 0):
        trace.open()
        trace.ack()
        trace.store.sync_queues()
        stored = []
        rolled = []

        def roll(parts: int = parts, rolled: list[int] = rolled) -> None:
            rolled.append(1)
            if not parts:
                raise FailPointReached

        def store(
            parts: int = parts, rolled: list[int] = rolled, stored: list[int] = stored
        ) -> None:
            stored += rolled
            if rolled and len(stored) == parts:
                raise FailPointReached

        with failpoint("log.roll", roll), failpoint("log.after_store", store):
            for turn in range(20):
                try:
                    trace.put(turn % 2, 1, 1300, producer=70)
                except FailPointReached:
                    break
        assert rolled
        assert len(stored) == parts
        trace.store.log.close(clean=False)
    trace.open()
    trace.ack()
    for turn in range(4):
        trace.put(turn % 2, 1, 1300, producer=70)
    trace.ack()
    return trace


#: of the trace with keys: of every record
KEYS = ("k1", "k2", "k3")


def indexed(width: int) -> Trace:
    """Keyed records over several index files, which are synced now and then; a start in the middle."""
    trace = Trace(width, salt=12)
    trace.properties = b"KEYS\x01" + " ".join(KEYS).encode() + b"\x02"
    trace.open()
    for turn in range(24):
        trace.put(turn % 2, 1 + turn % 3, 150)
        if turn % 3 == 2:
            trace.ack()
        if turn % 7 == 6:
            trace.store.sync_queues()
        if turn == 15:
            trace.ack()
            trace.store.close()
            trace.open()
    return trace


# --- checks -------------------------------------------------------------------------------------


def check(trace: Trace, image: SimulatedDisk, *, power: bool, verify: bool = False) -> None:
    """Recover `image` and compare it with what was promised and what was ever put."""
    promise: Promise = image.notes[-1] if image.notes else NOTHING
    ends = dict(promise.acked if power else promise.returned)
    batches = promise.acked_batches if power else promise.returned_batches
    verify = verify and image.exists(ROOT / "commitlog")
    foretold = inspect_store(ROOT, image) if verify else None
    store = open_store(image)
    if foretold is not None:
        assert foretold.faults == [], "verify calls a fault what recovery mends"
        if foretold.verdict is not None:
            assert store.log.recovered is not None
            assert foretold.verdict.end == store.log.recovered.end, "verify finds another end"
            assert foretold.verdict.row == store.log.recovered.row
    try:
        assert set(trace.topics) <= store.state.topics.keys(), "a topic is lost"
        found = _read_log(trace, store)
        assert not ends or "t" in store.state.topics, "an acknowledged topic is lost"
        for queue, end in ends.items():
            assert len(found.get(("t", queue), ())) >= end, f"queue {queue} lost acked records"
        log_end = store.log.end
        for batch in batches:
            again = store.put(
                request(
                    [*batch.bodies],
                    queue=batch.queue,
                    tag="x",
                    producer=batch.producer,
                    sequence=batch.sequence,
                )
            )
            assert again.first_offset == batch.first_offset
            assert again.duplicates == len(batch.bodies)
        assert store.log.end == log_end, "a repeated batch was stored again"
        _check_queues(store, found)
        if trace.properties is not None and trace.properties.startswith(b"KEYS"):
            _check_index(store, found)
        if "t" in store.state.topics:
            made = store.put(request([b"next"]))
            assert made.first_offset == len(found.get(("t", 0), ()))
            for file in store.log.queue.files:
                if file.start < store.log.end:
                    assert read_head(file)[0] is not None, "a segment has no whole snapshot"
        assert found.keys() <= {(INTERNAL_TOPIC, 0), ("t", 0), ("t", 1)}, (
            "a topic that was never put"
        )
    finally:
        store.close()


def _read_log(trace: Trace, store: MessageStore) -> dict[Queue, list[tuple[int, int, int]]]:
    """(position, size, tags code) of every record; bodies and offsets are compared."""
    found: dict[Queue, list[tuple[int, int, int]]] = {}
    end = store.log.start
    for file in store.log.queue.files:
        view = file.read_view()
        walk = record.walk(view, file.start, stop=CONFIG.segment_size_bytes)
        if walk.end > file.start:
            assert end == file.start, "a segment stands behind a hole"
        if walk.reason is record.WalkStop.BLANK:
            end = file.start + CONFIG.segment_size_bytes
        elif len(walk.positions):
            # A file that was made ahead has none.
            end = walk.end
        if not len(walk.positions):
            continue
        for run in rows.runs(view, file.start, walk.positions, walk.sizes):
            units = found.setdefault((run.topic, run.queue_id), [])
            assert run.first_offset == len(units), "queue offsets are not dense"
            if run.topic != INTERNAL_TOPIC:
                for written in run.batch.column("properties").to_pylist():
                    assert written.endswith(trace.properties or b"TAGS\x01x\x02"), "torn properties"
                for row, body in enumerate(run.batch.column("body").to_pylist()):
                    known = trace.put_at.get((run.queue_id, run.first_offset + row), set())
                    assert body in known, "a record that was never put"
            codes = rows.tags_codes(run.topic, run.batch).tolist()
            units += zip(run.positions.tolist(), run.sizes.tolist(), codes, strict=True)
    assert end == store.log.end, "valid records stand behind the end"
    return found


def _check_queues(store: MessageStore, found: dict[Queue, list[tuple[int, int, int]]]) -> None:
    store.log.sync()
    store.log.note_confirmed(store.log.end)
    dispatch_all(store)
    for key, units in found.items():
        assert store.queue_range(*key) == (0, len(units))
        have = store.consume_queues.get(*key).read(0, len(units))
        seen = [(int(u["position"]), int(u["size"]), int(u["tags_code"])) for u in have]
        assert seen == units, f"the consume queue of {key} differs from the log"
    for key in store.queues():
        assert key in found or store.queue_range(*key) == (0, 0)


def _check_index(store: MessageStore, found: dict[Queue, list[tuple[int, int, int]]]) -> None:
    while store.index_behind:
        store.dispatch(store.log.confirmed)
    positions = [at for (topic, _), units in found.items() if topic == "t" for at, _, _ in units]
    for key in KEYS:
        parts = store.index.find("t", key, 0, 1 << 62)
        have = [at for part in parts for at in part.physical_offsets.tolist()]
        assert have == sorted(positions, reverse=True), "the index differs from the log"


def image_key(image: SimulatedDisk) -> int:
    """A hash of every name, length and block of a disk."""
    names = frozenset(
        (number, name, child)
        for number, entries in image.base.dirs.items()
        for name, child in entries.items()
    )
    content = frozenset(
        (number, size, frozenset(blocks.items()))
        for number, (blocks, size) in image.base.files.items()
    )
    return hash((names, content))


def states(trace: Trace) -> Iterator[tuple[bool, int, SimulatedDisk]]:
    """(power loss, image hash, disk); an image comes once for each boot and promise."""
    seen: set[tuple[bool, int, object]] = set()
    every = itertools.chain(
        ((True, image) for image in trace.disk.crash_states(limit_per_point=LIMIT, seed=SEED)),
        ((False, image) for image in trace.disk.kill_states()),
    )
    for power, image in every:
        promise: Promise = image.notes[-1] if image.notes else NOTHING
        key = image_key(image)
        owed = promise.acked if power else promise.returned
        if (power, key, owed) not in seen:
            seen.add((power, key, owed))
            yield power, key, image


#: trace, and the distinct images that are at least tried at blocks of 4096 and of 512 bytes
TRACES: list[tuple[Callable[[int], Trace], int, int]] = [
    (appends, 3000, 3000),
    (large_properties, 2500, 2500),
    (rolls, 3000, 3000),
    (checkpoints, 3000, 3000),
    (snapshots, 3000, 3000),
    (truncations, 3000, 3000),
    (clean_closes, 3000, 3000),
    (large_snapshots, 1000, 1000),
    (broken_snapshots, 1000, 1000),
    (indexed, 3000, 3000),
]
CASES = [
    pytest.param(make, width, least, id=f"{make.__name__}-{width}")
    for make, coarse, fine in TRACES
    for width, least in ((4096, coarse), (512, fine))
]


def test_the_traces_make_at_least_20000_distinct_images() -> None:
    assert sum(coarse + fine for _, coarse, fine in TRACES) >= 20_000


@pytest.mark.parametrize(("make", "width", "least"), CASES)
def test_every_crash_keeps_what_was_promised(
    make: Callable[[int], Trace], width: int, least: int
) -> None:
    trace = make(width)
    images: set[int] = set()
    recovered = 0
    started = time.perf_counter()
    for number, (power, key, image) in enumerate(states(trace)):
        images.add(key)
        if number % STRIDE:
            continue
        recovered += 1
        try:
            check(trace, image, power=power, verify=not recovered % VERIFY_STRIDE)
        except Exception as error:
            kind = "power loss" if power else "kill"
            error.args = (f"{kind} at {image.crashed_at}, state {number}: {error}",)
            raise
    rate = recovered / (time.perf_counter() - started)
    print(
        f"\n{make.__name__}, blocks of {width}, seed {SEED}: {len(images)} distinct images, "
        f"{recovered} recoveries, {rate:.0f}/s"
    )
    assert len(images) >= least


@pytest.mark.parametrize(
    "make",
    [rolls, snapshots, truncations, broken_snapshots, indexed],
    ids=lambda make: make.__name__,
)
def test_a_second_crash_during_recovery_keeps_what_was_promised(
    make: Callable[[int], Trace],
) -> None:
    trace = make(4096)
    power_images = [image for power, _, image in states(trace) if power]
    again = 0
    for image in random.Random(SEED).sample(power_images, 6):
        recording = image.recording()
        store = open_store(recording)
        store.close()
        for second in recording.crash_states(limit_per_point=6, seed=SEED):
            again += 1
            check(trace, second, power=True)
    print(f"\n{make.__name__}: {again} second crashes, seed {SEED}")
    assert again >= 200
