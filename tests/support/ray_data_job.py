"""A job of Ray Data that writes a topic and reads it, and stops in the middle of each part until a leader was killed.

    python -m tests.support.ray_data_job URL CA RAY_ADDRESS PLACE

The token is in RAYMQ_TOKEN. Prints one JSON object: the rows that were written, and what each read found.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import ray

import raymq
from raymq.data import TopicSink, read_topic
from tests.support.leader_kills import stop_until_killed

TOPIC = "rows"
#: several fetches of each queue
ROWS, VALUE_BYTES = 16_000, 1024
#: the number or offset at which a task stops
MIDDLE = 1_000
READS = ("leader", "nearest")


def rows_of(batch: pa.Table, *, place: str) -> pa.Table:
    """Rows of their numbers."""
    numbers = batch.column("id")
    if numbers[0].as_py() >= MIDDLE:
        stop_until_killed(place)
    return pa.table({"value": pc.utf8_rpad(numbers.cast(pa.string()), VALUE_BYTES, "x")})


def numbers_of(batch: pa.Table, *, place: str) -> pa.Table:
    """The inverse of `rows_of`."""
    if batch.column("offset")[0].as_py() >= MIDDLE:
        stop_until_killed(place)
    texts = pc.utf8_rtrim(batch.column("value").cast(pa.string()), "x")
    return pa.table({"id": texts.cast(pa.int64())})


def main(url: str, ca: str, ray_address: str, directory: str) -> None:
    place = Path(directory)
    ray.init(ray_address, namespace="test", log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    options: Any = {"batch_format": "pyarrow", "batch_size": 500}
    with raymq.connect(url, ca=ca) as cluster:
        sink = TopicSink(cluster, TOPIC)
        numbers = ray.data.range(ROWS, override_num_blocks=2)
        where = {"place": str(place / "write")}
        numbers.map_batches(rows_of, fn_kwargs=where, **options).write_datasink(sink)
        found: dict[str, Any] = {"written": sink.result and sink.result.rows}

        for read_from in READS:
            where = {"place": str(place / read_from)}
            rows = read_topic(cluster, TOPIC, read_from=read_from)
            batches = rows.map_batches(numbers_of, fn_kwargs=where, **options)
            ids = np.array([row["id"] for row in batches.iter_rows()])
            found[read_from] = [len(ids), len(np.unique(ids)), int(ids.sum())]
    ray.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
