"""The options of a benchmark: distributions of sizes and keys, and what is refused."""

from __future__ import annotations

import math
import re

import numpy as np
import pyarrow as pa
import pytest

from raymq.client.messages.keys import keys_of
from raymq.client.messages.partitioner import queue_of
from raymq.cluster.bench.messages import KeyTable, RowMaker, body_bytes, damaged_rows, read_headers
from raymq.cluster.bench.plan import (
    BODY_BYTES_MIN,
    BenchPlan,
    FixedSize,
    Keys,
    LognormalSize,
    UniformSize,
    check_limit_ms,
    parse_keys,
    parse_size,
    plan_of,
)
from raymq.store.base.errors import Rejected
from raymq.store.records.property_columns import PropertyColumns
from raymq.store.records.record import check_put


def due(count: int) -> np.ndarray:
    return np.full(count, 1_700_000_000_000_000, dtype=np.int64)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("100", FixedSize(100)),
        ("fixed:100", FixedSize(100)),
        ("uniform:100-200", UniformSize(100, 200)),
        ("lognormal:500", LognormalSize(500, 1.0)),
        ("lognormal:500:0.5", LognormalSize(500, 0.5)),
    ],
)
def test_sizes_are_understood(text: str, sizes: object) -> None:
    assert parse_size(text) == sizes


@pytest.mark.parametrize("text", ["", "10", "x", "uniform:9", "uniform:200-100", "pareto:100"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(Rejected) as refused:
        parse_size(text)
    assert refused.value.field == "size"


def test_sizes_follow_their_distribution() -> None:
    rng = np.random.default_rng(1)
    uniform = parse_size("uniform:100-200").draw(rng, 50_000)
    assert (uniform.min(), uniform.max()) == (100, 200)
    assert abs(uniform.mean() - 150) < 1
    lognormal = parse_size("lognormal:1000:2").draw(rng, 50_000)
    assert abs(np.median(lognormal) - 1000) < 50
    assert lognormal.min() == BODY_BYTES_MIN


@pytest.mark.parametrize("text", ["zipf", "uniform:0", "uniform:5:1", "zipf:5:x", "a:5"])
def test_unknown_keys_are_refused(text: str) -> None:
    with pytest.raises(Rejected) as refused:
        parse_keys(text)
    assert refused.value.field == "keys"


def test_keys_are_as_frequent_as_said() -> None:
    assert parse_keys("none") is None
    assert parse_keys("uniform:4") == Keys(4)
    keys = parse_keys("zipf:3:1")
    assert keys is not None
    assert np.diff(keys.weights(), prepend=0) == pytest.approx([6 / 11, 3 / 11, 2 / 11])


def test_a_key_is_in_the_queue_that_every_producer_gives_it() -> None:
    queues, properties = KeyTable(Keys(50), 4).draw(np.random.default_rng(1), 500)
    keys = keys_of(PropertyColumns(properties)).to_pylist()
    assert queues.tolist() == [queue_of(key, 4) for key in keys]
    assert len(set(keys)) == 50


@pytest.mark.parametrize("size", ["48", "uniform:48-3000"])
@pytest.mark.parametrize("keys", ["none", "zipf:100"])
def test_rows_are_storable_and_tell_what_they_are(size: str, keys: str) -> None:
    plan = BenchPlan(size=parse_size(size), keys=parse_keys(keys), topics=2, run=7)
    maker, next_sequence = RowMaker(plan, worker=3), {}

    for _ in range(10):
        for queue_index, queue_due_us, rows in maker.make(due(100)):
            check_put("t", rows, max_message_bytes=1 << 20)
            headers, found = read_headers(rows.column("body"), run=7)
            first = next_sequence.get(queue_index, 0)
            next_sequence[queue_index] = first + rows.num_rows
            assert found.tolist() == list(range(rows.num_rows))
            assert headers["sequence"].tolist() == list(range(first, next_sequence[queue_index]))
            assert set(headers["queue_index"].tolist()) == {queue_index}
            assert headers["due_us"].tolist() == queue_due_us.tolist()
            assert headers["size"].sum() == body_bytes(rows.column("body"))
            assert damaged_rows(rows.column("body"), headers, found) == 0

    assert sum(next_sequence.values()) == 1000
    assert set(next_sequence) == set(range(8))


def test_a_wrong_byte_anywhere_after_the_header_is_damage() -> None:
    _, _, rows = RowMaker(BenchPlan(size=parse_size("uniform:60-90"), run=7), 0).make(due(50))[0]
    bodies = rows.column("body").to_pylist()
    bodies[10] = bodies[10][:-1] + bytes([bodies[10][-1] ^ 1])
    bodies[20] = bodies[20][:48] + bytes([bodies[20][48] ^ 1]) + bodies[20][49:]
    column = pa.array(bodies, pa.binary())
    headers, found = read_headers(column, run=7)
    assert damaged_rows(column, headers, found) == 2


def test_rows_of_others_are_not_this_runs() -> None:
    rows = RowMaker(BenchPlan(run=7), 0).make(due(5))[0][2].column("body").to_pylist()
    column = pa.array([b"short", rows[0], rows[1][:-1], b"x" * 1024, rows[2]], pa.binary())
    assert read_headers(column, run=7)[1].tolist() == [1, 4]
    assert read_headers(column, run=8)[1].tolist() == []


def test_options_that_were_not_given_are_the_plans_own() -> None:
    given = {"mode": "e2e", "rate": 10.0, "size": "100", "keys": None, "workers": None, "x": 1}
    assert plan_of(given) == BenchPlan(mode="e2e", rate=10.0, size=FixedSize(100))


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"rate": -1.0}, "rate"),
        ({"rate": math.nan}, "rate"),
        ({"rate": 1e12}, "rate"),
        ({"rate": 5.0, "mode": "consume"}, "rate"),
        ({"duration_s": 0.0}, "duration_s"),
        ({"duration_s": math.nan}, "duration_s"),
        ({"duration_s": math.inf}, "duration_s"),
        ({"warmup_s": -1.0}, "warmup_s"),
        ({"warmup_s": math.nan}, "warmup_s"),
        ({"linger_ms": -1.0}, "linger_ms"),
        ({"batch": 0}, "batch"),
        ({"batch": 4000, "size": "1000000"}, "batch"),
        ({"workers": 5000}, "workers"),
        ({"queues": 65_537}, "queues"),
        ({"shards": "1,x"}, "shards"),
        ({"shards": "-1"}, "shards"),
        ({"shards": "1", "keys": "uniform:5"}, "shards"),
        ({"size": "47"}, "size"),
        ({"keys": "zipf:0"}, "keys"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused_with_the_option_and_its_limit(
    options: dict[str, object], field: str
) -> None:
    with pytest.raises(Rejected) as refused:
        plan_of(options)
    assert refused.value.field == field
    assert str(refused.value).startswith(f"{field} ")
    assert re.search("use|leave|up to", str(refused.value))
    assert refused.value.fields["limit"] is not None


@pytest.mark.parametrize("limit_ms", [0.0, -1.0, math.nan, math.inf])
def test_a_latency_that_cannot_be_kept_is_refused(limit_ms: float) -> None:
    with pytest.raises(Rejected, match="find_max is .*: use more than 0"):
        check_limit_ms(limit_ms)


def test_rows_go_only_to_the_queues_that_are_used() -> None:
    maker = RowMaker(BenchPlan(queues=4, topics=2, used_indexes=(1, 6), run=7), worker=0)
    assert [maker.make(due(5))[0][0] for _ in range(4)] == [1, 6, 1, 6]


@pytest.mark.parametrize("duration_s", [0.3, 2.0, 2.5, 59.9, 600.0, 86_400.0])
def test_the_duration_is_a_whole_number_of_ticks_and_not_too_many(duration_s: float) -> None:
    plan = BenchPlan(duration_s=duration_s)
    assert plan.ticks * plan.tick_s == pytest.approx(duration_s)
    assert plan.ticks <= 600
