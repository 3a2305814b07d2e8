"""Stores that are driven on a recorded disk: the workloads whose every crash is tried.

A trace is a recorded disk, what its callers were promised at each place of it, and all that was ever put. It is the
same at every run: chance, clock, store id and the pool's name are fixed.
"""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from raymq.store.config.store_config import StoreConfig
from raymq.store.engine.message_store import MessageStore
from raymq.store.groups.claims import Claim, Commit, claim_value
from raymq.store.groups.members import CLAIM
from raymq.store.groups.transaction_requests import (
    COMMITTED,
    OffsetCommit,
    TransactionCommit,
    TransactionName,
)
from raymq.store.put.inner_message import InnerMessage, ServiceProgress
from raymq.store.records.requests import PutRequest
from raymq.store.services.leases import LeaseService
from raymq.store.services.transaction_commits import SERVICE, TransactionCommits
from tests.support.batches import batch
from tests.support.clock import ManualClock
from tests.support.confirming import dispatch_all
from tests.support.crash_states import disk_of
from tests.support.simulated_disk import Base, SimulatedDisk

SEED = 20
ROOT = Path("/s")
CONFIG = StoreConfig(
    segment_size_bytes=16 * 1024,
    consume_queue_file_size_bytes=400,
    max_message_bytes=2000,
    prewrite_window_bytes=8 * 1024,
    max_hash_slot_num=10,
    max_index_num=40,
)
#: snapshots are within segments of every record of the trace with keys
KEYS = ("k1", "k2", "k3")
MIDDLES = replace(CONFIG, snapshot_interval_bytes=3000)
POOLED = replace(CONFIG, flush="async", transient_pool=True, transient_pool_slice_bytes=4096)
#: an empty disk of a machine that has /dev/shm
WITH_MEMORY = Base({}, {0: {"dev": 1}, 1: {"shm": 2}, 2: {}})
#: topics of a state that needs three SNAPSHOT records
TOPICS = tuple(f"topic-{number:02d}-{'x' * 60}" for number in range(38))
Queue = tuple[str, int]


class Batch(NamedTuple):
    """One acknowledged idempotent batch."""

    queue: int
    producer_id: int
    sequence: int
    first_offset: int
    bodies: tuple[bytes, ...]


class Owed(NamedTuple):
    """Facts that must hold: records of each queue, the newest batch of each producer, facts of the state."""

    ends: tuple[tuple[int, int], ...] = ()
    batches: tuple[Batch, ...] = ()
    #: what -> a number that only grows: ("topic", name), ("offset", group, queue), ("epoch", producer)
    facts: tuple[tuple[tuple[str | int, ...], int], ...] = ()
    #: what must not be there: bodies of puts that were refused
    refused: tuple[bytes, ...] = ()


class Promise(NamedTuple):
    """The answers that callers had at one place of a trace."""

    #: by every call that returned: a kill loses none of it
    returned: Owed = Owed()
    #: by every call that was synced
    acked: Owed = Owed()

    def owed(self, *, power: bool) -> Owed:
        """The facts that must survive a power loss or a kill."""
        return self.acked if power else self.returned


NOTHING = Promise()


def owed_by(image: SimulatedDisk, *, power: bool) -> Owed:
    """The promises from before the crash that left this disk."""
    promise: Promise = image.notes[-1] if image.notes else NOTHING
    return promise.owed(power=power)


class Trace:
    """A recorded disk, what was ever put on it, and a store that is being driven."""

    def __init__(
        self,
        block_bytes: int,
        *,
        record: bool = True,
        salt: int = 0,
        config: StoreConfig = CONFIG,
    ) -> None:
        self.disk = SimulatedDisk(block_bytes=block_bytes, record=record)
        self.config = config
        self.chance = random.Random(SEED + salt)

        #: bodies that were ever put at (queue, offset)
        self.put_at: dict[tuple[int, int], set[bytes]] = {}
        self.ends: dict[int, int] = {}
        self.sequences: dict[int, int] = {}
        #: of every record that is put
        self.properties: bytes | None = None

        self.batches: dict[int, Batch] = {}
        self.facts: dict[tuple[str | int, ...], int] = {}
        self.refused: list[bytes] = []
        #: rows of both queues after each group
        self.groups: list[int] = []
        #: each group is a transaction, whose offset is that number of rows
        self.transacts = False

        self.acked = Owed()
        #: topics that the disk has from the beginning
        self.topics: tuple[str, ...] = ()
        self.store: MessageStore

    def open(self) -> None:
        self.store = open_store(self.disk, self.config)
        if "t" not in self.store.state.topics:
            self.store.topics.create("t", 2, [0])
            self.ends = {0: 0, 1: 0}
            self.ack()

    def begin_with_topics(self) -> None:
        """Start from a disk that holds TOPICS, and a snapshot of them of three parts."""
        disk = SimulatedDisk(block_bytes=self.disk.block_bytes, record=False)
        store = open_store(disk)
        for name in TOPICS:
            store.topics.create(name, 4, [0])
        store.topics.create("t", 2, [0])
        # Nothing of these is a promise: queue offsets are counted from here.
        store.log.sync()
        store.log.note_confirmed(store.log.end)
        store.close()
        parts = store.state.snapshot(min(1 << 20, CONFIG.segment_size_bytes // 8))
        assert len(parts) == 3
        self.begin_with(disk.tree())
        self.topics = (*TOPICS, "t")
        self.ends = {0: 0, 1: 0}

    def owed(self) -> Owed:
        return Owed(
            tuple(self.ends.items()),
            tuple(self.batches.values()),
            tuple(self.facts.items()),
            tuple(self.refused),
        )

    def note(self) -> None:
        # That a put was refused is durable before the caller hears of it.
        acked = self.acked._replace(refused=tuple(self.refused))
        self.disk.note(Promise(self.owed(), acked))

    def note_fact(self, number: int, *what: str | int) -> None:
        """The state holds a number of this name, or a higher one."""
        self.facts[what] = number
        self.note()

    def put(self, queue: int, rows: int, size: int, *, producer_id: int | None = None) -> None:
        bodies = tuple(self.chance.randbytes(size) for _ in range(rows))
        offset = self.ends[queue]
        for row, body in enumerate(bodies):
            self.put_at.setdefault((queue, offset + row), set()).add(body)

        sequence = self.sequences.get(queue, 0)
        # The producer's number is its queue's: each has one stream of sequences.
        who = None if producer_id is None else producer_id + queue
        values = batch([*bodies], tag="x", properties=self.properties)
        made = self.store.put(PutRequest("t", queue, values, who, 0, sequence, "quorum"))

        assert made.first_offset == offset
        self.ends[queue] += rows
        if who is not None:
            self.sequences[queue] = sequence + rows
            self.batches[queue] = Batch(queue, who, sequence, offset, bodies)
        self.note()

    def put_group(self, count: int, size: int) -> None:
        """Put messages to both queues in turn, in one group with the note of their number."""
        messages: list[InnerMessage] = []
        ends = dict(self.ends)
        for number in range(count):
            queue, body = number % 2, self.chance.randbytes(size)
            self.put_at.setdefault((queue, ends[queue]), set()).add(body)
            ends[queue] += 1
            messages.append(InnerMessage("t", queue, body, {"TAGS": "x"}))
        self.groups.append(sum(ends.values()))
        if self.transacts:
            self._commit(messages)
        else:
            self.store.put_inner(
                messages, progress=ServiceProgress("groups", {"rows": self.groups[-1]})
            )
        self.ends = ends
        self.note()

    def _commit(self, messages: list[InnerMessage]) -> None:
        """Put messages, and commit an offset: the number of the messages by then."""
        store, session = self.store, b"t" * 16
        if not store.claims.claims:
            value = claim_value("g", "t", {0: Claim(1, "member")})
            store.inner_put.put_state_record(CLAIM, json.dumps(value).encode())
        puts = []
        for queue in (0, 1):
            bodies = [each.body for each in messages if each.queue_id == queue]
            if bodies:
                puts.append(PutRequest("t", queue, batch(bodies, tag="x"), None, 0, 0, "quorum"))
        noted = store.state.progress.get(SERVICE, {}).get(session.hex(), {"number": 0})
        offset = OffsetCommit("g", "t", {0: Commit(1, self.groups[-1])})
        name = TransactionName(session, noted["number"] + 1)
        commits = TransactionCommits(store, LeaseService(store))
        assert commits.commit(TransactionCommit(name, puts, [offset])).decision == COMMITTED

    def noted_rows(self, store: MessageStore) -> int:
        """How many rows there are, as the newest group of a store says."""
        if self.transacts:
            return store.state.offsets.get(("g", "t"), {}).get(0, 0)
        return int(store.state.progress.get("groups", {}).get("rows", 0))

    def prewrite(self) -> None:
        """Steps of the worker ahead of the tail beside the puts, until it has nothing to do."""
        allocator = self.store.log.allocator
        pieces = 0
        while allocator.step():
            pieces += 1
        assert pieces or allocator.ready, allocator.last_error

    def ack(self) -> None:
        """Sync, confirm, promise, dispatch: what the host does for a group of puts."""
        self.store.log.commit_pool()
        self.store.log.sync()
        self.promise_all()
        self.store.log.note_confirmed(self.store.log.synced)
        dispatch_all(self.store)

    def promise_all(self) -> None:
        self.acked = self.owed()
        self.note()

    def begin_with(self, tree: Mapping[str, bytes]) -> None:
        """Start from a disk that holds these files."""
        self.disk = disk_of(tree, boot=0, block_bytes=self.disk.block_bytes).recording()

    def begin_with_crash(self, image: SimulatedDisk, *, power: bool) -> None:
        """Start from a disk that a crash of this trace left: what was owed then is owed still."""
        owed = owed_by(image, power=power)
        # A kill leaves all that was written, but of what was not synced a power loss may still take any part.
        self.acked = owed_by(image, power=True)
        self.disk = image.recording()
        self.disk.notes = (*image.notes, Promise(owed, self.acked))
        self.batches = {made.queue: made for made in owed.batches}
        self.facts = dict(owed.facts)
        self.refused = list(owed.refused)

    def go_on(self) -> None:
        """Open what a crash left, and count from what is there."""
        self.store = open_store(self.disk, self.config)
        state = self.store.state
        queues = (0, 1) if "t" in state.topics else ()
        self.ends = {queue: state.next_offsets.get(("t", queue), 0) for queue in queues}
        self.note()


def open_store(disk: SimulatedDisk, config: StoreConfig = CONFIG) -> MessageStore:
    return MessageStore.open(ROOT, config=config, files=disk, clock=ManualClock())


@contextmanager
def fixed_names() -> Iterator[None]:
    """Store ids and names of pools that are the same at every run."""
    with (
        mock.patch("uuid.uuid4", return_value=uuid.UUID(int=SEED)),
        mock.patch("os.urandom", bytes),
    ):
        yield
