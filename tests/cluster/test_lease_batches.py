"""Loops over datasets of leased messages, of a served shard. Ray Data itself is in tests/ray/test_ray_data.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from raymq.cluster.ray_data import lease_batches as module
from raymq.cluster.ray_data.lease_batches import lease_batches
from raymq.cluster.ray_data.topic_source import SCHEMA
from raymq.store.base.errors import Rejected
from tests.support.served_shard import ServedShard

ROWS = 30


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedShard]:
    with ServedShard(Path(tmp_path_factory.mktemp("leases"))) as made:
        made.start_flusher()
        made.cluster.create_topic("t", queues=2)
        with made.cluster.producer() as producer:
            for row in range(ROWS):
                tag = "red" if row % 3 == 0 else None
                producer.send("t", b"%d" % row, queue_id=row % 2, tag=tag)
        yield made
    made.stop_flusher()


@pytest.fixture(autouse=True)
def tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables of a dataset in its place."""
    monkeypatch.setattr(module, "from_arrow", pa.concat_tables)


def loop(shard: ServedShard, group: str, **options: Any) -> Iterator[Any]:
    chosen = {"max_rows": 8, "idle_s": 0, **options}
    return lease_batches(shard.cluster, "t", group, **chosen)


def numbers(table: pa.Table) -> list[int]:
    return [int(each) for each in table.column("value").to_pylist()]


def test_each_message_is_in_one_dataset_of_one_of_the_loops(shard: ServedShard) -> None:
    loops = [loop(shard, "shared"), loop(shard, "shared")]
    found: list[list[int]] = []
    while loops:
        for each in list(loops):
            table = next(each, None)
            if table is None:
                loops.remove(each)
            else:
                assert table.schema == SCHEMA
                assert 0 < table.num_rows <= 8
                found.append(numbers(table))
    assert sorted(sum(found, [])) == list(range(ROWS))
    assert shard.cluster.describe_group("shared")["lag"] == 0


def test_messages_of_several_queues_come_in_one_dataset(shard: ServedShard) -> None:
    (table,) = loop(shard, "whole", max_rows=1000)
    assert set(table.column("partition").to_pylist()) == {0, 1}
    assert table.num_rows == ROWS


def test_what_a_body_that_raises_has_got_comes_again(shard: ServedShard) -> None:
    seen: list[int] = []

    def fail() -> None:
        for table in loop(shard, "failing", max_rows=1000, max_attempts=2):
            seen.extend(numbers(table))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert sorted(seen) == list(range(ROWS))
    again = [numbers(table) for table in loop(shard, "failing", max_attempts=2, idle_s=3)]
    assert sorted(sum(again, [])) == list(range(ROWS))


def test_a_filter_leaves_out_the_others(shard: ServedShard) -> None:
    found = [numbers(table) for table in loop(shard, "tagged", tags="red")]
    assert sorted(sum(found, [])) == list(range(0, ROWS, 3))
    assert shard.cluster.describe_group("tagged")["lag"] == 0


@pytest.mark.parametrize(
    ("options", "field"),
    [({"max_rows": 0}, "max_rows"), ({"idle_s": -1}, "idle_s"), ({"lease_s": 0}, "lease_s")],
)
def test_wrong_options_are_refused(shard: ServedShard, options: dict[str, Any], field: str) -> None:
    with pytest.raises(Rejected) as caught:
        next(loop(shard, "wrong", **options))
    assert caught.value.fields["field"] == field
