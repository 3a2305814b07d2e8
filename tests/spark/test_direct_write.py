"""A task that sends its rows to their queues at once: repeated, it stores what is missing, and finds changed rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from raymq.errors import Fenced, Rejected
from raymq.spark.direct_write import DirectWrite, _begin, producer_id_of
from tests.support.served_shard import PATIENT, ServedShard

ROWS = [f"row-{number}" for number in range(50)]


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[ServedShard]:
    config = dataclasses.replace(PATIENT, file_reserved_hours=0)
    with ServedShard(tmp_path, config) as served:
        served.start_flusher()
        yield served


def batch(values: list[str], **columns: list[Any]) -> pa.RecordBatch:
    arrays = {"value": pa.array(values)} | {name: pa.array(each) for name, each in columns.items()}
    return pa.RecordBatch.from_pydict(arrays)


def headers(value: bytes | None, count: int) -> pa.Array:
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    return pa.array([[{"key": "h", "value": value}]] * count, kind)


def direct(shard: ServedShard, *, verify: bool = True, queues: int = 1) -> DirectWrite:
    """A write to the topic `events`, which is made if it is not there."""
    shard.cluster.create_topic("events", queues=queues)
    return DirectWrite("events", "w", shard.cluster.topics()["events"], "quorum", verify)


def bodies(shard: ServedShard) -> list[str]:
    count = shard.cluster.describe_topic("events")["messages"]
    found: list[str] = []
    with shard.cluster.consumer("events", start="earliest") as consumer:
        while len(found) < count:
            found += [each.body.decode() for each in consumer.poll(timeout=20)]
    return found


def test_a_repeated_task_stores_only_what_is_missing(shard: ServedShard) -> None:
    write = direct(shard)
    (first,) = write.send(shard.cluster, 0, [batch(ROWS[:20])])
    assert (first.rows, first.duplicates, first.first_offset, first.last_offset) == (20, 0, 0, 19)
    (again,) = write.send(shard.cluster, 0, [batch(ROWS[:30]), batch(ROWS[30:])])
    assert (again.rows, again.duplicates, again.last_offset) == (50, 20, 49)
    assert bodies(shard) == ROWS


def test_partitions_of_one_write_are_producers_of_their_own(shard: ServedShard) -> None:
    write = direct(shard)
    for partition in (0, 1, 0):
        write.send(shard.cluster, partition, [batch(ROWS)])
    assert sorted(bodies(shard)) == sorted(ROWS * 2)


@pytest.mark.parametrize(
    "other",
    [
        batch([*ROWS[:7], "changed", *ROWS[8:]], tag=["t"] * 50, headers=headers(b"v", 50)),
        batch([*ROWS[:7], ROWS[8], ROWS[7], *ROWS[9:]], tag=["t"] * 50, headers=headers(b"v", 50)),
        batch(ROWS, tag=["t"] * 7 + ["other"] * 43, headers=headers(b"v", 50)),
        batch(ROWS, tag=["t"] * 7 + [None] * 43, headers=headers(b"v", 50)),
        batch(ROWS, tag=["t"] * 50, headers=[*headers(b"v", 7), *headers(b"other", 43)]),
        batch(ROWS, tag=["t"] * 50, key=[None] * 7 + ["k"] * 43, headers=headers(b"v", 50)),
    ],
    ids=["body", "order", "tag", "no tag", "header", "key"],
)
def test_other_rows_than_those_that_are_there_are_refused(
    shard: ServedShard, other: pa.RecordBatch
) -> None:
    write = direct(shard)
    write.send(shard.cluster, 0, [batch(ROWS, tag=["t"] * 50, headers=headers(b"v", 50))])
    with pytest.raises(Rejected, match="another row at offset 7 of queue 0 of events") as refused:
        write.send(shard.cluster, 0, [other])
    assert refused.value.field == "writeId"
    assert "delivery='staged'" in str(refused.value)
    assert bodies(shard) == ROWS
    # Without the comparison they count as the same.
    (taken,) = direct(shard, verify=False).send(shard.cluster, 0, [other])
    assert taken.duplicates == 50


def test_rows_are_compared_across_those_of_others_and_from_the_first_that_is_left(
    shard: ServedShard,
) -> None:
    write = direct(shard)
    large = [text * 2000 for text in ROWS]
    for first in range(0, 50, 10):
        write.send(shard.cluster, 0, [batch(large[: first + 10])])
        with shard.cluster.producer() as producer:
            producer.send("events", b"from another program").result(60)
    write.send(shard.cluster, 0, [batch(large)])

    left = shard.expire("events")
    assert 1 < left < 50
    write.send(shard.cluster, 0, [batch(large)])
    # A change among the rows that are left is found.
    with pytest.raises(Rejected, match="another row at offset"):
        write.send(shard.cluster, 0, [batch([*large[:-1], "changed"])])
    # One among those that are gone is not.
    write.send(shard.cluster, 0, [batch(["changed", *large[1:]])])


def test_an_attempt_is_fenced_by_a_later_one(shard: ServedShard) -> None:
    write = direct(shard)

    def overtaken() -> Iterator[pa.RecordBatch]:
        yield batch(ROWS[:10])
        write.send(shard.cluster, 0, [batch(ROWS)])
        yield batch(ROWS[10:])

    with pytest.raises(Fenced):
        write.send(shard.cluster, 0, overtaken())
    assert bodies(shard) == ROWS


def test_a_repeated_task_uses_the_queues_of_its_first_attempt(shard: ServedShard) -> None:
    keys = [f"key-{number}" for number in range(50)]
    direct(shard, queues=2).send(shard.cluster, 0, [batch(ROWS, key=keys)])
    shard.cluster.add_queues("events", 4, break_key_order=True)
    grown = direct(shard, queues=4)
    assert grown.facts["former_queues"] == [2]

    again = grown.send(shard.cluster, 0, [batch(ROWS, key=keys)])
    assert {each.queue_id for each in again} == {0, 1}
    assert sum(each.duplicates for each in again) == 50
    # Another partition has begun with the new number.
    other = grown.send(shard.cluster, 1, [batch(ROWS, key=keys)])
    assert {each.queue_id for each in other} == {0, 1, 2, 3}


def test_a_task_knows_the_first_of_several_numbers_of_queues(shard: ServedShard) -> None:
    young = {"queues": 2}
    grown = {"queues": 4, "former_queues": [2]}
    again = {"queues": 6, "former_queues": [2, 4]}
    assert _begin(shard.cluster, "early", 0, young).queues == 2
    assert _begin(shard.cluster, "early", 0, grown).queues == 2
    assert _begin(shard.cluster, "late", 0, grown).queues == 4
    found = [_begin(shard.cluster, each, 0, again) for each in ("early", "late", "new")]
    assert [each.queues for each in found] == [2, 4, 6]
    assert [each.epoch for each in found] == [2, 1, 0]


def test_producer_ids_depend_on_write_partition_and_queues_only() -> None:
    assert producer_id_of("w", 1, 2) == producer_id_of("w", 1, 2)
    others = {
        producer_id_of(*each) for each in (("w", 1, 2), ("w", 2, 2), ("v", 1, 2), ("w", 1, 3))
    }
    assert len(others) == 4
