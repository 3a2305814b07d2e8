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

    with pytest.raises(Fenced, match="another attempt of partition 0 of write w to events"):
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
    shard.cluster.create_topic("grown", queues=6)

    def queues(write_id: str, *numbers: int) -> tuple[int, int]:
        facts = {"queues": numbers[-1], "former_queues": list(numbers[:-1]), "shards": [0]}
        attempt = _begin(DirectWrite("grown", write_id, facts, "quorum", True), shard.cluster, 0)
        return attempt.queues, attempt.epoch

    assert queues("early", 2) == (2, 0)
    assert queues("early", 2, 4) == (2, 1)
    assert queues("late", 2, 4) == (4, 0)
    assert [queues(each, 2, 4, 6) for each in ("early", "late", "new")] == [(2, 2), (4, 1), (6, 0)]


def test_rows_without_a_key_are_stored_once_whatever_the_batches_are(shard: ServedShard) -> None:
    write = direct(shard, queues=2)
    many = [str(number) for number in range(12_000)]
    first = write.send(shard.cluster, 0, [batch(many[:9_000]), batch(many[9_000:])])
    assert {each.queue_id: each.rows for each in first} == {0: 10_000, 1: 2_000}
    again = write.send(shard.cluster, 0, [batch(many)])
    assert sum(each.duplicates for each in again) == 12_000
    assert shard.cluster.describe_topic("events")["messages"] == 12_000


def test_no_row_is_stored_after_the_first_one_that_has_changed(shard: ServedShard) -> None:
    write = direct(shard)
    write.send(shard.cluster, 0, [batch(ROWS[:20])])
    changed = [*ROWS[:5], "changed", *ROWS[6:]]
    with pytest.raises(Rejected, match="another row at offset 5"):
        write.send(shard.cluster, 0, [batch(changed[:10]), batch(changed[10:40]), batch(ROWS)])
    assert bodies(shard) == ROWS[:20]


def test_rows_that_an_earlier_attempt_has_stored_in_excess_are_found(shard: ServedShard) -> None:
    keys = [f"key-{number}" for number in range(50)]
    write = direct(shard, queues=2)
    write.send(shard.cluster, 0, [batch(ROWS, key=keys)])
    for fewer in (batch(ROWS[:40], key=keys[:40]), batch(ROWS[:1], key=keys[:1])):
        with pytest.raises(
            Rejected, match="has stored [0-9]+ rows in queue [01] of events, of which"
        ):
            write.send(shard.cluster, 0, [fewer])
    taken = direct(shard, verify=False, queues=2)
    (one,) = taken.send(shard.cluster, 0, [batch(ROWS[:1], key=keys[:1])])
    assert (one.rows, one.duplicates) == (1, 1)


def test_writes_of_one_name_to_two_topics_do_not_meet(shard: ServedShard) -> None:
    events = direct(shard)
    shard.cluster.create_topic("others", queues=1)
    facts = shard.cluster.topics()["others"]
    others = DirectWrite("others", "w", facts, "quorum", True)

    def both() -> Iterator[pa.RecordBatch]:
        yield batch(ROWS[:10])
        others.send(shard.cluster, 0, [batch(ROWS)])
        yield batch(ROWS[10:])

    events.send(shard.cluster, 0, both())
    assert shard.cluster.describe_topic("events")["messages"] == 50
    assert shard.cluster.describe_topic("others")["messages"] == 50


def test_a_write_keeps_the_number_of_its_partitions(tmp_path: Path) -> None:
    with ServedShard(tmp_path) as shard:
        shard.start_flusher()
        write = direct(shard)
        for _ in range(2):
            write.keep_partitions(shard.cluster, 4)
        with pytest.raises(
            Rejected, match="had 4 partitions at its first run, and has 5"
        ) as refused:
            write.keep_partitions(shard.cluster, 5)
        assert (refused.value.field, refused.value.limit) == ("writeId", 4)
        # Another write, and one of the same name to another topic, have numbers of their own.
        write._replace(write_id="v").keep_partitions(shard.cluster, 5)
        write._replace(topic="others").keep_partitions(shard.cluster, 5)


@pytest.mark.parametrize("queues_then", [1, 2])
def test_rows_of_partitions_that_a_repeated_write_lacks_are_found(
    shard: ServedShard, queues_then: int
) -> None:
    write = direct(shard, queues=1)
    for partition in (0, 1, 700):
        write.send(shard.cluster, partition, [batch(ROWS)])
    # One that began, and stored nothing.
    _begin(write, shard.cluster, 701)
    if queues_then > 1:
        shard.cluster.add_queues("events", queues_then, break_key_order=True)
        write = direct(shard, queues=queues_then)
    write.check_other_partitions(shard.cluster, 701)
    for count in (700, 2, 1):
        first = 1 if count == 1 else 700
        words = f"has {count} partitions now.*partition {first}, for example, has 50 rows"
        with pytest.raises(Rejected, match=words) as refused:
            write.check_other_partitions(shard.cluster, count)
        assert (refused.value.field, refused.value.found) == ("writeId", count)
    write._replace(write_id="v").check_other_partitions(shard.cluster, 1)


def test_a_task_without_rows_finds_those_of_an_earlier_attempt(shard: ServedShard) -> None:
    write = direct(shard)
    assert write.send(shard.cluster, 0, []) == []
    write.send(shard.cluster, 0, [batch(ROWS)])
    end = shard.host.store.log.end
    assert write.send(shard.cluster, 1, []) == []
    assert shard.host.store.log.end == end
    with pytest.raises(Rejected, match="stored 50 rows in queue 0 .*, of which this attempt has 0"):
        write.send(shard.cluster, 0, [])
    assert write._replace(verify=False).send(shard.cluster, 0, []) == []


def test_producer_ids_depend_on_topic_write_partition_and_queues_only() -> None:
    places = [
        ("t", "w", 1, 2),
        ("t", "w", 2, 2),
        ("t", "v", 1, 2),
        ("t", "w", 1, 3),
        ("u", "w", 1, 2),
    ]
    assert len({producer_id_of(*each) for each in [*places, *places]}) == len(places)
