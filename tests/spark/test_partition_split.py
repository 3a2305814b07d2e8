"""A Spark batch becomes one batch a queue, in row order, without Spark."""

import pyarrow as pa
import pytest

from raymq.client.messages.partitioner import queue_of
from raymq.client.messages.queue_split import TURN_ROWS, numbered, split
from raymq.client.messages.topic_values import TopicValues
from raymq.store.base.errors import Rejected

BYTES = TopicValues("t")


def batch(keys, values, tags=None, partitions=None):
    count = len(values)
    return pa.record_batch(
        [
            pa.array(keys, pa.binary()),
            pa.array(values, pa.binary()),
            pa.array(tags or [None] * count, pa.string()),
            pa.array(partitions or [None] * count, pa.int32()),
        ],
        names=["key", "value", "tag", "partition"],
    )


def test_rows_go_to_the_queue_of_their_key_in_row_order():
    keys = [b"a", b"b", b"a", b"c", b"a"]
    found = dict(split(batch(keys, [b"0", b"1", b"2", b"3", b"4"]), 4, 0, values=BYTES))
    mine = found[queue_of(b"a", 4)].column("body").to_pylist()
    assert [v for v in mine if v in (b"0", b"2", b"4")] == [b"0", b"2", b"4"]
    assert sum(part.num_rows for part in found.values()) == 5


def test_rows_without_a_key_go_to_the_queue_of_their_number():
    found = dict(split(batch([None, None], [b"x", b"y"]), 3, 7 * TURN_ROWS - 1, values=BYTES))
    assert {queue: part.column("body").to_pylist() for queue, part in found.items()} == {
        0: [b"x"],
        1: [b"y"],
    }


def test_a_row_has_the_same_number_whatever_the_batches_are():
    rows = batch([None] * 5, [b"%d" % number for number in range(5)])
    for sizes in ((5,), (2, 3), (1, 1, 3)):
        edges = [sum(sizes[:count]) for count in range(len(sizes))]
        parts = [rows.slice(*each) for each in zip(edges, sizes, strict=True)]
        first_rows = [row for row, _ in numbered(parts, 2)]
        assert first_rows == [2 * TURN_ROWS + edge for edge in edges]


def test_a_chosen_partition_wins_over_the_key():
    found = dict(split(batch([b"a"], [b"x"], partitions=[2]), 4, 0, values=BYTES))
    assert list(found) == [2]


def test_a_partition_out_of_range_names_its_row():
    with pytest.raises(Rejected, match="row 1: partition 9") as caught:
        list(split(batch([None, None], [b"x", b"y"], partitions=[0, 9]), 4, 0, values=BYTES))
    assert caught.value.field == "partition"


def test_a_null_value_is_refused_by_name_unless_the_topic_allows_it():
    with pytest.raises(Rejected, match="row 1: value is null.*allow_null_values=True") as caught:
        list(split(batch([None, None], [b"x", None]), 1, 0, values=BYTES))
    assert (caught.value.field, caught.value.row) == ("value", 1)
    allowed = TopicValues("t", allow_null=True)
    ((_, part),) = split(batch([b"k", None], [None, b""]), 1, 0, values=allowed)
    assert part.column("body").to_pylist() == [b"", b""]
    assert part.column("properties").to_pylist() == [b"__SHARDINGKEY\x01k\x02_N\x011\x02", None]
