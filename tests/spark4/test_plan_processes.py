"""Each step of a plan is a process: what it imports, and how often it asks a shard."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from raymq.client.consume.queue_ranges import QueueRange
from raymq.spark.queue_lookup import QueueLookup
from raymq.spark.sink_options import SinkOptions
from raymq.spark.sink_writers import BatchWriter
from raymq.spark.stream_reader import StreamReader
from tests.support.served_shard import ROOT, ServedShard

WANTED = [("value", "binary"), ("offset", "bigint")]


def imported(code: str, given: bytes = b"") -> set[str]:
    """The modules that some code loads in a new process, to which it is given as standard input."""
    print_all = "; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {code}{print_all}"],
        input=given,
        cwd=ROOT,
        capture_output=True,
        timeout=60,
        check=True,
    )
    return set(done.stdout.decode().split())


def test_the_search_for_the_format_imports_no_arrow() -> None:
    found = imported("import pyspark_raymq")
    assert "raymq.spark.data_source" in found
    assert not {"pyarrow", "numpy", "raymq.client"} & found


def test_a_direct_write_without_a_name_commits_without_imports(
    shard: ServedShard, options: dict[str, str]
) -> None:
    shard.cluster.create_topic("unnamed", queues=1)
    given = SinkOptions.parse({**options, "topic": "unnamed", "delivery": "direct"})
    writer = BatchWriter(given, [("value", "string")])
    found = imported(
        "import pickle; pickle.load(sys.stdin.buffer).commit([None])", pickle.dumps(writer)
    )
    assert "raymq.spark.sink_writers" in found
    assert not {"pyarrow", "numpy", "raymq.client"} & found


@pytest.mark.parametrize("delivery", ["direct", "staged"])
def test_a_pickled_writer_writes_every_row_once(
    shard: ServedShard, options: dict[str, str], spark: Any, delivery: str
) -> None:
    topic = f"pickled-{delivery}"
    shard.cluster.create_topic(topic, queues=2)
    rows = spark.range(0, 30, 1, 3).selectExpr("cast(id as string) as value")
    given = {**options, "topic": topic, "delivery": delivery}
    rows.write.format("raymq").mode("append").options(**given).save()
    found = spark.read.format("raymq").options(**options, subscribe=topic).load()
    assert sorted(int(row["value"]) for row in found.collect()) == list(range(30))


def test_the_shards_are_asked_once_for_the_ranges_of_a_batch(
    put: Callable[..., None], options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    put("asked", 0, b"a", b"b")
    reader = StreamReader({**options, "subscribe": "asked", "startingOffsets": "earliest"}, WANTED)
    asked = []
    queues = QueueLookup.queues

    def counted(self: QueueLookup) -> Any:
        asked.append(1)
        return queues(self)

    start = reader.initialOffset()
    end = reader.latestOffset(start)
    monkeypatch.setattr(QueueLookup, "queues", counted)
    first = reader.partitions(start, end)
    assert reader.partitions(start, end) == first
    assert len(asked) == 1
    assert [each.value for each in first] == [QueueRange("asked", 0, 0, 0, 2)]
    assert reader.partitions(end, end) == []
    assert len(asked) == 2
    reader.stop()
