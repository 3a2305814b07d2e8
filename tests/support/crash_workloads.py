"""The workloads whose every crash is tried, by name. `crash_traces.py` drives them."""

from __future__ import annotations

import errno
import itertools
import random
from collections.abc import Callable

from raymq.store.base.errors import StorageFull
from raymq.store.base.failpoints import FailPointReached, failpoint
from raymq.store.log.commit_log import CommitLog
from raymq.store.log.recovery.log_recovery import recover
from raymq.store.records.requests import PutRequest
from tests.support.batches import batch
from tests.support.clock import ManualClock
from tests.support.crash_states import kill_states, power_loss_states
from tests.support.crash_traces import (
    CONFIG,
    KEYS,
    MIDDLES,
    POOLED,
    ROOT,
    SEED,
    WITH_MEMORY,
    Trace,
    fixed_names,
)
from tests.support.simulated_disk import SimulatedDisk


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


def prewritten(width: int) -> Trace:
    """Zeros are written and synced ahead of the tail, and files made there, between puts over rolls."""
    trace = Trace(width, salt=20)
    trace.open()
    for turn in range(16):
        trace.put(turn % 2, 2, 600 + 40 * turn)
        if turn % 2:
            trace.prewrite()
        if turn % 3 == 2:
            trace.ack()
    assert len(trace.store.log.segments.files) > 2
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
        trace.put(turn % 2, 2, 700, producer_id=70)
        if turn % 5 == 4:
            trace.store.commit_offsets("g", "t", {0: turn})
        if turn % 3 == 2:
            trace.ack()
        if turn == 11:
            trace.store.sync_queues()
    return trace


def truncations(width: int) -> Trace:
    """A follower takes a tail that is cut above the confirmed end and replaced by other records, twice.

    The confirmed end is two puts below the common end of both leaders: one cut is above it, one at it, none below.
    """
    trace = Trace(width, salt=5)
    log = CommitLog(ROOT, CONFIG, files=trace.disk, clock=ManualClock())
    recover(log, 0)

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
    """Cut a follower to what `left` has. Its promises about the rest end before that."""
    trace.ends, trace.batches = dict(left.ends), dict(left.batches)
    trace.promise_all()
    assert left.store.log.end >= log.confirmed, "a follower never cuts below its confirmed end"
    log.truncate(left.store.log.end)


def _leader(width: int, *, shared: int, salt: int, tail: int) -> Trace:
    """A store with `shared` puts that are the same for every salt, then `tail` of its own."""
    trace = Trace(width, record=False, salt=5)
    trace.open()
    for turn in range(shared):
        trace.put(turn % 2, 2, 500, producer_id=70)
    trace.chance = random.Random(SEED + salt)
    for turn in range(tail):
        trace.put(turn % 2, 2 + salt % 2, 400 + 50 * salt, producer_id=70)
    return trace


def _follow(trace: Trace, log: CommitLog, leader: Trace) -> None:
    """Append the leader's units one by one. Sync after every third and at the end."""
    source = leader.store.log
    units = [u for u in source.chain.units(source.start, source.end) if u.start >= log.end]
    for number, unit in enumerate(units):
        log.append_units([unit], memoryview(source.reads.raw(unit.start, unit.end)))
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
            trace.put(turn % 2, 2, 300 + 100 * life, producer_id=70)
            if turn == 3:
                trace.ack()
        trace.ack()
        trace.store.close()
        trace.note()
    return trace


def large_snapshots(width: int) -> Trace:
    """Rolls with a state that needs three SNAPSHOT records. Some are synced and confirmed between them.

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
            trace.put(turn % 2, 1, 1300, producer_id=70)
            if turn % 4 == 3:
                trace.ack()
    return trace


def broken_snapshots(width: int) -> Trace:
    """The process ends after a seal and after each part of a snapshot. All of it was synced."""
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
                    trace.put(turn % 2, 1, 1300, producer_id=70)
                except FailPointReached:
                    break
        assert rolled
        assert len(stored) == parts
        trace.store.log.close(clean=False)
    trace.open()
    trace.ack()
    for turn in range(4):
        trace.put(turn % 2, 1, 1300, producer_id=70)
    trace.ack()
    return trace


def sealed(width: int) -> Trace:
    """Files that are ended early, as at a change of leaders. The tail of one is cut in between."""
    trace = Trace(width, salt=12)
    trace.open()
    for turn in range(10):
        trace.put(turn % 2, 2, 200, producer_id=70)
        if turn % 3 == 1:
            trace.ack()
        if turn % 3 == 2:
            trace.store.log.seal(turn)
    return trace


def administration(width: int) -> Trace:
    """Topics, committed offsets and producer epochs between puts, over two rolls."""
    trace = Trace(width, salt=13)
    trace.open()

    for turn in range(14):
        store = trace.store
        store.topics.create(f"topic-{turn}", 2, [0])
        trace.note_fact(2, "topic", f"topic-{turn}")
        store.commit_offsets("g", "t", {0: turn, 1: 2 * turn})
        trace.note_fact(turn, "offset", "g", 0)
        trace.note_fact(2 * turn, "offset", "g", 1)
        epoch, _ = store.inner_put.init_producer(5)
        trace.note_fact(epoch, "epoch", 5)
        trace.put(turn % 2, 1, 1500)
        if turn % 3 == 2:
            trace.ack()

    return trace


def full_disk(width: int) -> Trace:
    """A disk that is full now and then: puts are refused, with half of their bytes written, and come later.

    Refused messages were never put: recovery must not find them.
    """
    trace = Trace(width, salt=14)
    trace.open()

    for turn in range(18):
        if turn % 3 == 1:
            # The bytes, the chain unit, the next file: each in its turn.
            kind, at = (("pwrite", 1), ("pwrite", 2), ("allocate", 1))[turn // 3 % 3]
            trace.disk.fail(kind, at=at, error=errno.ENOSPC)
            end, body = trace.ends[0], b"%02d" % turn * 700
            trace.put_at.setdefault((0, end), set()).add(body)
            try:
                values = batch([body], tag="x")
                trace.store.put(PutRequest("t", 0, values, None, 0, 0, "quorum"))
                # The fault was for a call that this put did not make.
                trace.ends[0] += 1
            except StorageFull:
                trace.refused.append(body)
            trace.note()
            trace.disk.heal()

        trace.put(turn % 2, 2, 500)
        if turn % 4 == 3:
            trace.ack()

    assert len(trace.refused) >= 4
    return trace


def pooled(width: int) -> Trace:
    """Appends through the transient pool. A kill keeps what is only there, a power loss takes it."""
    trace = Trace(width, salt=15, config=POOLED)
    trace.disk = SimulatedDisk(block_bytes=width, base=WITH_MEMORY)
    trace.open()
    for turn in range(16):
        trace.put(turn % 2, 2, 400 + 20 * turn)
        if turn % 3 == 1:
            trace.store.log.commit_pool()
        if turn % 4 == 3:
            trace.ack()
    return trace


def foreign(width: int) -> Trace:
    """The first starts of a store that knows nothing of `raymq/`: without chain, marks and meta."""
    trace = Trace(width, salt=16)
    made = Trace(width, record=False, salt=16)
    made.open()

    for turn in range(6):
        made.put(turn % 2, 2, 700)
    made.ack()
    made.store.close()

    trace.begin_with({p: d for p, d in made.disk.tree().items() if "/raymq/" not in p})
    trace.ends, trace.put_at, trace.chance = made.ends, made.put_at, made.chance
    trace.promise_all()
    trace.open()

    for turn in range(8):
        trace.put(turn % 2, 2, 700)
        if turn % 3 == 2:
            trace.ack()
    return trace


def reopened(width: int) -> Trace:
    """Lives that each end in a crash: recovery, puts, and again, on what the crash before left."""
    trace = Trace(width, salt=17)
    trace.open()

    for life in range(5):
        for turn in range(4):
            trace.put(turn % 2, 2, 300 + 90 * life)
            if turn == life % 4:
                trace.ack()

        power = life % 2 == 0
        if power:
            last = len(trace.disk.snapshot())
            left = [s for s in power_loss_states(trace.disk, 12, SEED) if s.crashed_at == last]
            image = left[len(left) // 2]
        else:
            *_, image = kill_states(trace.disk)
        trace.begin_with_crash(image, power=power)
        trace.go_on()
        for queue in (life % 2, 1 - life % 2):
            trace.put(queue, 1, 100)

    trace.ack()
    return trace


def indexed(width: int) -> Trace:
    """Keyed records over several index files, which are synced now and then. A start in the middle."""
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


def middles(width: int) -> Trace:
    """Snapshots within segments, of idempotent producers. A start in the middle of a segment."""
    trace = Trace(width, salt=18, config=MIDDLES)
    trace.open()
    for turn in range(20):
        trace.put(turn % 2, 2, 400, producer_id=90)
        if turn % 3 == 2:
            trace.ack()
        if turn == 9:
            trace.store.abandon()
            trace.open()
        if turn % 5 == 4:
            trace.store.sync_queues()
    assert len({*trace.store.log.marks.snapshots}) == 2
    return trace


def groups(width: int) -> Trace:
    """Messages that stand or fall together, over rolls."""
    trace = Trace(width, salt=19)
    trace.open()
    for turn in range(16):
        trace.put_group(2 + turn % 3, 300 + 40 * turn)
        if turn % 4 == 3:
            trace.ack()
    return trace


def transactions(width: int) -> Trace:
    """Rows of both queues, and the offset that says how many there are, over rolls."""
    trace = Trace(width, salt=21)
    trace.transacts = True
    trace.open()
    for turn in range(16):
        trace.put_group(1 + turn % 4, 150 + 25 * turn)
        if turn % 4 == 3:
            trace.ack()
    return trace


#: name -> the trace, and combinations tried at each place of it
TRACES: dict[str, tuple[Callable[[int], Trace], int]] = {
    make.__name__: (make, limit)
    for make, limit in (
        (appends, 64),
        (large_properties, 64),
        (rolls, 13),
        (prewritten, 13),
        (checkpoints, 26),
        (snapshots, 13),
        (truncations, 16),
        (clean_closes, 16),
        (large_snapshots, 6),
        (broken_snapshots, 6),
        (sealed, 45),
        (administration, 16),
        (full_disk, 32),
        (pooled, 77),
        (foreign, 58),
        (reopened, 77),
        (indexed, 10),
        (middles, 10),
        (groups, 13),
        (transactions, 13),
    )
}


def make_trace(name: str, width: int) -> Trace:
    """The trace of this name on a disk of blocks of `width` bytes."""
    with fixed_names():
        return TRACES[name][0](width)
