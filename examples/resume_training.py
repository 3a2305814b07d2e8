"""A training loop reads a topic as torch's IterableDataset does, and resumes from a checkpoint's offsets.

    python examples/resume_training.py [DATA_DIR]

`TopicDataset` has the `__iter__` of torch.utils.data.IterableDataset, and the `state_dict` and `load_state_dict` of
stateful loaders. A "training" that is interrupted in the middle resumes from the offsets in its checkpoint and sees
every sample once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

import raymq

SAMPLES, FEATURES, BATCH = 4_096, 16, 256


class TopicDataset:
    """The samples of a topic as float32[n, FEATURES], up to the end of the topic when the dataset was made."""

    def __init__(self, cluster: raymq.Cluster, topic: str) -> None:
        self._cluster, self._topic = cluster, topic
        queues = cluster.describe_topic(topic)["queues"]
        self._ends = {queue["queue_id"]: queue["max_offset"] for queue in queues}
        self._offsets = {queue["queue_id"]: queue["min_offset"] for queue in queues}

    def __iter__(self) -> Iterator[np.ndarray[Any, np.dtype[np.float32]]]:
        with self._cluster.consumer(self._topic, start=dict(self._offsets)) as consumer:
            while any(self._offsets[queue] < end for queue, end in self._ends.items()):
                batch = consumer.poll_batch(max_records=BATCH, timeout=10)
                if not batch.num_rows:
                    continue
                # Before the batch is yielded: a checkpoint after its step counts it as seen.
                self._offsets = consumer.positions()
                body = batch.column("body")
                data = np.frombuffer(b"".join(body.to_pylist()), dtype=np.float32)
                yield data.reshape(batch.num_rows, FEATURES)

    def state_dict(self) -> dict[str, Any]:
        """The offsets at which to resume, for the checkpoint."""
        return {"offsets": {str(queue): offset for queue, offset in self._offsets.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume at the offsets of a checkpoint."""
        self._offsets = {int(queue): offset for queue, offset in state["offsets"].items()}


def main() -> None:
    """Train, interrupt, resume, and check that every sample was seen once."""
    samples = np.random.default_rng(7).random((SAMPLES, FEATURES), dtype=np.float32)
    with raymq.start(sys.argv[1] if len(sys.argv) > 1 else "raymq-training") as cluster:
        cluster.create_topic("samples", queues=2)
        with cluster.producer() as producer:
            for queue, half in enumerate(np.split(samples, 2)):
                rows = pa.record_batch({"body": pa.array([row.tobytes() for row in half])})
                producer.send_batch("samples", rows, queue_id=queue)

        total, seen = np.zeros(FEATURES, dtype=np.float64), 0
        first = TopicDataset(cluster, "samples")
        for batch in first:
            total += batch.sum(axis=0, dtype=np.float64)
            seen += len(batch)
            if seen >= SAMPLES // 3:
                break
        checkpoint = json.dumps(first.state_dict())

        resumed = TopicDataset(cluster, "samples")
        resumed.load_state_dict(json.loads(checkpoint))
        for batch in resumed:
            total += batch.sum(axis=0, dtype=np.float64)
            seen += len(batch)
    right = bool(np.allclose(total, samples.sum(axis=0, dtype=np.float64)))
    print(json.dumps({"samples": SAMPLES, "seen": seen, "sums_equal": right}))
    if seen != SAMPLES or not right:
        sys.exit(1)


if __name__ == "__main__":
    main()
