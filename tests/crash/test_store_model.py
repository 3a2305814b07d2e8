"""A store beside a model in plain Python: puts, repeats, syncs, reads, stops, kills and power losses in any order.

The model knows of each queue what was put, how much of it was synced, and which batches a producer sent.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from raymq.store.base.errors import OffsetOutOfRange
from raymq.store.records import record
from raymq.store.records.requests import AppendedRows
from tests.support.batches import request
from tests.support.confirming import dispatch_all
from tests.support.crash_states import last_states
from tests.support.crash_traces import open_store
from tests.support.simulated_disk import SimulatedDisk

QUEUES = (0, 1)
PRODUCER = 7
Key = tuple[str, int]


class StoreModel(RuleBasedStateMachine):
    """The messages that must be readable, whatever happened before."""

    def __init__(self) -> None:
        super().__init__()
        self.disk = SimulatedDisk(block_bytes=512)
        self.store = open_store(self.disk)
        #: bodies of each queue of each topic, in order
        self.put: dict[Key, list[bytes]] = {}
        #: how many of them were synced
        self.synced: dict[Key, int] = {}
        #: topic -> whether it was synced
        self.topics: dict[str, bool] = {}
        #: first sequence, offset and bodies of the idempotent batches of each queue
        self.sent: dict[Key, list[tuple[int, int, list[bytes]]]] = {}
        #: body of each next record
        self.number = 0
        #: group's next offset: what was committed, and what of it was synced
        self.committed = self.committed_synced = -1

    @initialize()
    def first_topic(self) -> None:
        self.create("t0")
        self.sync()

    def create(self, name: str) -> None:
        self.store.topics.create(name, len(QUEUES), [0])
        if name not in self.topics:
            self.topics[name] = False
            for queue in QUEUES:
                self.put[name, queue] = []
                self.synced[name, queue] = 0
                self.sent[name, queue] = []

    def bodies(self, count: int, size: int) -> list[bytes]:
        self.number += count
        return [(b"%06d" % (self.number - row)).ljust(size, b".") for row in range(count)]

    # --- what callers do --------------------------------------------------------------------------

    @rule(name=st.sampled_from(["t1", "t2"]))
    def create_topic(self, name: str) -> None:
        self.create(name)

    @rule(
        data=st.data(),
        queue=st.sampled_from(QUEUES),
        count=st.integers(1, 6),
        size=st.sampled_from([6, 300, 1900]),
    )
    def put_batch(self, data: st.DataObject, queue: int, count: int, size: int) -> None:
        key = data.draw(st.sampled_from(sorted(self.topics))), queue
        bodies = self.bodies(count, size)
        made = self.store.put(request([*bodies], topic=key[0], queue=queue))
        assert made.first_offset == len(self.put[key])
        self.put[key] += bodies

    @rule(queue=st.sampled_from(QUEUES), count=st.integers(1, 4), size=st.sampled_from([6, 900]))
    def put_idempotent(self, queue: int, count: int, size: int) -> None:
        key = "t0", queue
        bodies = self.bodies(count, size)
        made = self.send(key, self.next_sequence(key), bodies)
        assert (made.first_offset, made.duplicates) == (len(self.put[key]), 0)
        self.sent[key].append((self.next_sequence(key), made.first_offset, bodies))
        self.put[key] += bodies

    @precondition(lambda self: any(self.sent.values()))
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        """A producer without an answer sends again, perhaps with new rows at the end."""
        key = data.draw(st.sampled_from(sorted(key for key, sent in self.sent.items() if sent)))
        first, offset, bodies = data.draw(st.sampled_from(self.sent[key]))
        made = self.send(key, first, bodies)
        assert (made.first_offset, made.duplicates) == (offset, len(bodies))
        assert made.last_offset in (-1, offset + len(bodies) - 1)

    def next_sequence(self, key: Key) -> int:
        sent = self.sent[key]
        return sent[-1][0] + len(sent[-1][2]) if sent else 0

    def send(self, key: Key, sequence: int, bodies: list[bytes]) -> AppendedRows:
        return self.store.put(
            request(
                [*bodies],
                topic=key[0],
                queue=key[1],
                producer_id=PRODUCER + key[1],
                sequence=sequence,
            )
        )

    @rule()
    def commit_offset(self) -> None:
        self.committed += 1
        self.store.commit_offsets("g", "t0", {0: self.committed})

    # --- what the host does -----------------------------------------------------------------------

    @rule()
    def sync(self) -> None:
        self.store.log.sync()
        self.store.log.note_confirmed(self.store.log.synced)
        self.synced = {key: len(bodies) for key, bodies in self.put.items()}
        self.topics = dict.fromkeys(self.topics, True)
        self.committed_synced = self.committed

    @rule()
    def dispatch(self) -> None:
        dispatch_all(self.store)

    @rule()
    def sync_queues(self) -> None:
        dispatch_all(self.store)
        self.store.sync_queues()

    # --- what happens -----------------------------------------------------------------------------

    @rule()
    def close_and_open(self) -> None:
        self.sync()
        self.store.close()
        self.store = open_store(self.disk)

    @rule()
    def kill(self) -> None:
        killed, _ = last_states(self.disk, 1, 0)
        self.go_on(killed)
        assert self.store.log.recovered is not None
        self.compare({key: len(bodies) for key, bodies in self.put.items()})

    @rule(seed=st.integers(0, 1000), which=st.integers(0, 11))
    def power_loss(self, seed: int, which: int) -> None:
        _, lost = last_states(self.disk, 12, seed)
        self.go_on(lost[which % len(lost)])
        self.topics = {name: kept for name, kept in self.topics.items() if self.has(name, kept)}
        self.put = {key: bodies for key, bodies in self.put.items() if key[0] in self.topics}
        self.compare(self.synced)
        offsets = self.store.state.next_offsets
        for key, bodies in self.put.items():
            del bodies[offsets.get(key, 0) :]
            # A batch that lay over the end of a file may be there in part.
            self.sent[key] = [
                (first, offset, sent[: len(bodies) - offset])
                for first, offset, sent in self.sent[key]
                if offset < len(bodies)
            ]
        found = self.store.state.offsets.get(("g", "t0"), {}).get(0, -1)
        assert self.committed_synced <= found <= self.committed
        self.committed = found

    def has(self, name: str, must: bool) -> bool:
        found = name in self.store.state.topics
        assert found or not must, f"topic {name} is lost"
        return found

    def go_on(self, disk: SimulatedDisk) -> None:
        self.disk = disk.recording()
        self.store = open_store(self.disk)

    def compare(self, least: dict[Key, int]) -> None:
        """At least so many records of each queue are in the log, and none that was not put."""
        offsets = self.store.state.next_offsets
        for key, bodies in self.put.items():
            assert least[key] <= offsets.get(key, 0) <= len(bodies), key

    # --- what is always so ------------------------------------------------------------------------

    @invariant()
    def what_is_confirmed_and_dispatched_can_be_read(self) -> None:
        for key, bodies in self.put.items():
            low, high = self.store.queue_range(*key)
            assert low == 0
            assert self.read(key) == bodies[:high], key

    @rule()
    def read_to_the_end(self) -> None:
        self.sync()
        dispatch_all(self.store)
        for key, bodies in self.put.items():
            assert self.read(key) == bodies
            with pytest.raises(OffsetOutOfRange):
                self.store.fetch(*key, len(bodies) + 1, max_bytes=1, max_records=1)

    def read(self, key: Key) -> list[bytes]:
        found: list[bytes] = []
        while len(found) < self.store.queue_range(*key)[1]:
            part = self.store.fetch(*key, len(found), max_bytes=1 << 20, max_records=100)
            assert part.records is not None
            for raw in part.records.to_pylist():
                found += record.decode(raw, [0], [len(raw)]).column("body").to_pylist()
        return found

    def teardown(self) -> None:
        self.store.abandon()


class TestStoreModel(StoreModel.TestCase):  # type: ignore[misc]
    settings = settings(max_examples=settings.default.max_examples // 4, stateful_step_count=40)
