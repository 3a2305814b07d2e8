"""Verification finds what was planted: a loss, a repetition, a disorder, a wrong byte, a stranger."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest

from raymq.client.produce.batch_sender import BatchSender
from raymq.cluster.bench.check import Ledger, ReadRange, SequenceCheck, Verdict, verify
from raymq.cluster.bench.messages import RowMaker
from raymq.cluster.bench.plan import BenchPlan, parse_size
from raymq.store.records.record import PUT_SCHEMA
from tests.support.fake_backend import FakeCluster

PLAN = BenchPlan(topic="t", queues=1, run=7, size=parse_size("uniform:50-200"))
ROWS = 100


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    """One shard, with topic t of four queues."""
    with contextlib.closing(FakeCluster()) as made:
        made.create_topic("t", queues=4)
        yield made


def ledger(acknowledged: int, worker: int = 0) -> Ledger:
    promise = Ledger(worker)
    promise.acknowledge(0, 0, acknowledged)
    return promise


def checked(*pieces: list[int], promise: Ledger | None = None) -> Verdict:
    """The verdict on sequences read in pieces, with 6 promised."""
    check = SequenceCheck("here")
    for piece in pieces:
        check.feed(np.array(piece, dtype=np.int64))
    return check.finish((promise or ledger(6)).queues[0])


@pytest.mark.parametrize(
    ("pieces", "fault", "count"),
    [
        ([[0, 1, 2], [3, 4, 5]], None, 0),
        ([[0, 1, 2], [4, 5]], "lost", 1),
        ([[0, 1, 2, 3]], "lost", 2),
        ([[0, 1, 2, 2, 3], [4, 5]], "duplicates", 1),
        ([[0, 1, 2], [2, 3, 4, 5]], "duplicates", 1),
        ([[0, 1, 2, 3, 4, 5], [0, 1, 2]], "duplicates", 3),
        ([[0, 2, 1, 3], [4, 5]], "disorder", 1),
        ([[0, 1, 2, 4], [3, 5]], "disorder", 1),
        ([[1, 2, 3, 4, 5], [0]], "disorder", 1),
        ([[0, 1, 2, 3, 4, 5, 6]], "phantom", 1),
        ([[0, 1, 2, 3, 4, 5, 4000]], "phantom", 1),
    ],
)
def test_each_fault_is_counted_as_what_it_is(
    pieces: list[list[int]], fault: str | None, count: int
) -> None:
    verdict = checked(*pieces)
    assert verdict.faults == count
    if fault is not None:
        assert getattr(verdict, fault) == count
        assert "here: sequence" in verdict.examples[0]


def test_a_row_of_unknown_fate_may_be_there_or_not_but_only_once() -> None:
    promise = ledger(4)
    promise.leave_open(0, 4, 2)
    assert checked([0, 1, 2, 3], promise=promise).faults == 0
    assert checked([0, 1, 2, 3, 4, 5], promise=promise).faults == 0
    assert checked([0, 1, 2, 3, 4, 4], promise=promise).duplicates == 1


def test_a_refused_row_that_is_there_is_a_phantom() -> None:
    promise = ledger(3)
    promise.refuse(0, 3, 2)
    promise.acknowledge(0, 5, 1)
    assert checked([0, 1, 2, 5], promise=promise).faults == 0
    verdict = checked([0, 1, 2, 3, 5], promise=promise)
    assert (verdict.phantom, verdict.faults) == (1, 1)
    assert (promise.acknowledged, promise.refused, promise.unknown) == (4, 2, 0)


# --- through a shard ------------------------------------------------------------------------------


def store(cluster: FakeCluster, bodies: list[bytes]) -> None:
    count = len(bodies)
    columns = [pa.array(bodies, pa.binary()), pa.nulls(count, pa.string())]
    columns += [pa.nulls(count, pa.binary()), pa.array([1] * count, pa.int64())]
    with contextlib.closing(BatchSender(cluster.routes())) as sender:
        sender.send("t", 0, pa.RecordBatch.from_arrays(columns, schema=PUT_SCHEMA)).result(10)


def verdict_on(cluster: FakeCluster, promises: list[Ledger]) -> Verdict:
    end = cluster.backends[0].queues["t", 0].max_offset
    *pieces, verdict = verify(cluster, PLAN, [ReadRange(0, 0, 0, end)], promises)  # type: ignore[arg-type]
    assert sum(pieces) == end
    assert isinstance(verdict, Verdict)
    return verdict


def bodies_of(worker: int) -> list[bytes]:
    due = np.zeros(ROWS, dtype=np.int64)
    found: list[bytes] = RowMaker(PLAN, worker).make(due)[0][2].column("body").to_pylist()
    return found


def test_two_workers_mixed_with_others_are_sound(cluster: FakeCluster) -> None:
    first, second = bodies_of(0), bodies_of(1)
    mixed = [body for pair in zip(first, second, strict=True) for body in pair]
    store(cluster, [b"a stranger's", *mixed])
    verdict = verdict_on(cluster, [ledger(ROWS, 0), ledger(ROWS, 1)])
    assert (verdict.acknowledged, verdict.read, verdict.faults) == (2 * ROWS, 2 * ROWS, 0)


def test_a_planted_loss_repetition_disorder_and_wrong_byte_are_all_found(
    cluster: FakeCluster,
) -> None:
    bodies = bodies_of(0)
    del bodies[90]
    bodies[50], bodies[51] = bodies[51], bodies[50]
    bodies.insert(30, bodies[10])
    bodies[5] = bodies[5][:-1] + bytes([bodies[5][-1] ^ 255])
    store(cluster, bodies)
    verdict = verdict_on(cluster, [ledger(ROWS)])
    counts = (verdict.lost, verdict.duplicates, verdict.disorder, verdict.damaged)
    assert counts == (1, 1, 1, 1)
    assert verdict.faults == 4
    assert any("sequence 90 was acknowledged and is not there" in e for e in verdict.examples)


def test_what_is_missing_at_the_end_of_a_queue_that_is_too_short_is_not_called_lost(
    cluster: FakeCluster,
) -> None:
    bodies = bodies_of(0)[:90]
    del bodies[50]
    store(cluster, bodies)
    verdict = verdict_on(cluster, [ledger(ROWS)])
    assert (verdict.lost, verdict.hidden, verdict.faults) == (1, 10, 11)
    assert any("sequence 90 was acknowledged and is not visible" in e for e in verdict.examples)
    # As long as was promised: nothing comes after it.
    store(cluster, [b"a stranger's"] * 11)
    verdict = verdict_on(cluster, [ledger(ROWS)])
    assert (verdict.lost, verdict.hidden) == (11, 0)


def test_the_rows_of_an_unknown_worker_are_phantoms(cluster: FakeCluster) -> None:
    store(cluster, bodies_of(9))
    assert verdict_on(cluster, []).phantom == ROWS
