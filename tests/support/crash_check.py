"""Recovery of the disks that a crash may leave, and the comparison with what was promised before it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from raymq.store.base import format as fmt
from raymq.store.engine.message_store import MessageStore
from raymq.store.log.recovery.snapshot_head import read_head
from raymq.store.records import record, rows
from raymq.store.state.shard_state import INTERNAL_TOPIC
from raymq.store.tools.inspect import check as inspect_store
from tests.support.batches import request
from tests.support.confirming import confirm
from tests.support.crash_traces import (
    KEYS,
    ROOT,
    SEED,
    Owed,
    Queue,
    Trace,
    open_store,
    owed_by,
)
from tests.support.simulated_disk import SimulatedDisk

#: one of so many recovered stores is looked at, even if it equals an earlier one
LOOK_STRIDE = 200
#: every how many-th look `verify` is asked before what recovery will do
VERIFY_STRIDE = 3


def states(trace: Trace, limit: int) -> Iterator[tuple[bool, SimulatedDisk]]:
    """(power loss, disk), each disk once for each boot and promise."""
    seen: set[tuple[bool, int, Owed]] = set()
    for power in (True, False):
        images = (
            trace.disk.crash_states(limit_per_point=limit, seed=SEED + trace.disk.block_bytes)
            if power
            else trace.disk.kill_states()
        )
        for image in images:
            key = (power, image.key, owed_by(image, power=power))
            if key not in seen:
                seen.add(key)
                yield power, image


class Checker:
    """Recovers disks of one trace. Two that recover to the same store are checked once.

    The same means: the same promise, and equal log, consume queues, state and positions, byte by byte. The result of
    a check follows from these alone. Every two-hundredth store is checked all the same.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.recovered = 0
        self.looks = 0
        self._seen: set[tuple[Owed, Any]] = set()
        #: boot and disk -> what it recovered to
        self._outcomes: dict[tuple[int, int], Any] = {}

    def check(self, image: SimulatedDisk, *, power: bool) -> None:
        """Recover one disk. Raises: AssertionError, or what recovery raises."""
        owed = owed_by(image, power=power)
        known = self._outcomes.get((image.boot, image.key))
        if known is not None and (owed, known) in self._seen:
            # The same disk with another promise: its recovered store was checked before.
            return

        self.recovered += 1
        always = self.recovered % LOOK_STRIDE == 1
        foretold = None
        # Of a store that was killed with a pool in use `verify` shows the state without the pool.
        if (
            self.recovered % (LOOK_STRIDE * VERIFY_STRIDE) == 1
            and image.exists(ROOT / "commitlog")
            and (power or not self.trace.config.transient_pool)
        ):
            foretold = inspect_store(ROOT, image)

        store = open_store(image, self.trace.config)
        if foretold is not None:
            assert foretold.faults == [], (
                f"{foretold.faults} verify calls a fault what recovery mends"
            )
            if foretold.verdict is not None:
                assert store.log.recovered is not None
                assert foretold.verdict.end == store.log.recovered.end, "verify finds another end"
                assert foretold.verdict.row == store.log.recovered.row.name

        assert store.log.chain.last is None or store.log.chain.last.end == store.log.end
        outcome = self._outcomes[image.boot, image.key] = tuple(_outcome(store, image))
        if (owed, outcome) in self._seen and not always:
            store.abandon()
            return
        self._seen.add((owed, outcome))
        self.looks += 1
        look(self.trace, store, owed)


def _outcome(store: MessageStore, image: SimulatedDisk) -> Iterator[Any]:
    """All that a look at a recovered store depends on."""
    log = store.log
    yield (
        log.start,
        log.end,
        log.committed,
        log.synced,
        store.dispatched,
        store.snapshots.segment,
    )

    yield tuple(store.state.snapshot(1 << 20))
    for path, content in image.content("/s/commitlog"):
        yield path, hash(content)
    for directory in ("/s/consumequeue", "/s/index"):
        for path, content in image.content(directory):
            yield path, hash(content)

    yield store.index.indexed


def look(trace: Trace, store: MessageStore, owed: Owed) -> None:
    """Compare a recovered store with what was promised and what was ever put. Then put more, and close it."""
    ends = dict(owed.ends)
    try:
        store.log.commit_pool()
        assert set(trace.topics) <= store.state.topics.keys(), "a topic is lost"
        found = _read_log(trace, store, owed)
        assert not ends or "t" in store.state.topics, "an acknowledged topic is lost"
        for queue, end in ends.items():
            assert len(found.get(("t", queue), ())) >= end, f"queue {queue} lost acked records"
        _check_facts(store, owed)

        log_end = store.log.end
        for batch in owed.batches:
            again = store.put(
                request(
                    [*batch.bodies],
                    queue=batch.queue,
                    tag="x",
                    producer_id=batch.producer_id,
                    sequence=batch.sequence,
                )
            )
            assert again.first_offset == batch.first_offset
            assert again.duplicates == len(batch.bodies)
        assert store.log.end == log_end, "a repeated batch was stored again"

        _check_queues(store, found)
        if trace.properties is not None and trace.properties.startswith(b"KEYS"):
            _check_index(store, found)
        if trace.groups:
            rows_found = sum(len(found.get(("t", queue), ())) for queue in (0, 1))
            assert trace.noted_rows(store) == rows_found, "half a group is there"

        if "t" in store.state.topics:
            made = store.put(request([b"next"]))
            assert made.first_offset == len(found.get(("t", 0), ()))
            store.log.commit_pool()
            check_snapshots(store)
        assert found.keys() <= {(INTERNAL_TOPIC, 0), ("t", 0), ("t", 1)}, (
            "a topic that was never put"
        )
    finally:
        store.close()


def check_snapshots(store: MessageStore) -> None:
    """A whole snapshot is in each segment before anything else: see docs/recovery.md, "Snapshots".

    One kind of segment is allowed to have none: crashes broke off its snapshots, and the next one found no room. The
    engine ends such a segment and begins a newer one with a whole snapshot. No start begins its walk at the ended one.
    """
    log = store.log
    size = log.config.segment_size_bytes
    needed = None
    for file in reversed(log.segments.files):
        if file.start >= log.end:
            # It was made ahead.
            continue

        complete_at, parts_end = read_head(file)
        walk = record.walk(file.read_view(), file.start, stop=size)
        if complete_at is not None:
            # Broken-off snapshots may precede the whole one.
            needed = complete_at - max(
                at
                for at in walk.positions.tolist()
                if at < complete_at and read_head(file, at)[0] == complete_at
            )
            continue

        assert needed is not None, "the newest segment has no whole snapshot"
        assert walk.end == parts_end, "a record follows a snapshot that was broken off"
        assert walk.reason is record.WalkStop.BLANK, "a segment without a snapshot was not ended"
        room = file.start + size - parts_end - fmt.BLANK_BYTES
        assert room < needed, "a segment was ended that had room for a snapshot"


def _check_facts(store: MessageStore, owed: Owed) -> None:
    state = store.state
    for what, number in owed.facts:
        kind, name = what[:2]
        if kind == "topic":
            assert state.topics[str(name)].queues == number, "an acknowledged topic is lost"
        elif kind == "offset":
            assert state.offsets[str(name), "t"][int(what[2])] >= number, "an offset fell back"
        else:
            assert (state.producers.epoch(int(name)) or 0) >= number, "a producer's epoch fell back"


def _read_log(
    trace: Trace, store: MessageStore, owed: Owed
) -> dict[Queue, list[tuple[int, int, int]]]:
    """(position, size, tags code) of every record. Bodies and offsets are compared."""
    found: dict[Queue, list[tuple[int, int, int]]] = {}
    size = trace.config.segment_size_bytes
    end = store.log.start

    for file in store.log.segments.files:
        view = file.read_view()
        walk = record.walk(view, file.start, stop=size)
        if walk.end > file.start:
            assert end == file.start, "a segment stands after a hole"
        if walk.reason is record.WalkStop.BLANK:
            end = file.start + size
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
                    assert body not in owed.refused, "a put that was refused"
            codes = rows.tags_codes(run.topic, run.batch).tolist()
            units += zip(run.positions.tolist(), run.sizes.tolist(), codes, strict=True)

    assert end == store.log.end, "valid records follow the end"
    return found


def _check_index(store: MessageStore, found: dict[Queue, list[tuple[int, int, int]]]) -> None:
    while store.reput.index_behind:
        store.dispatch(store.log.confirmed)
    positions = [at for (topic, _), units in found.items() if topic == "t" for at, _, _ in units]
    for key in KEYS:
        parts = store.index.find("t", key, 0, 1 << 62)
        have = [at for part in parts for at in part]
        assert have == sorted(positions, reverse=True), "the index differs from the log"


def _check_queues(store: MessageStore, found: dict[Queue, list[tuple[int, int, int]]]) -> None:
    confirm(store)
    for key, units in found.items():
        assert store.queue_range(*key) == (0, len(units))
        have = store.consume_queues.get(*key).read(0, len(units))
        seen = [(int(u["position"]), int(u["size"]), int(u["tags_code"])) for u in have]
        assert seen == units, f"the consume queue of {key} differs from the log"
    for key in store.queues():
        assert key in found or store.queue_range(*key) == (0, 0)
