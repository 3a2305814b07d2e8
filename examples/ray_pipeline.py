"""Ray tasks hand events to each other through two topics: nothing is lost when any of them dies.

    python examples/ray_pipeline.py [DATA_DIR]

Tasks write `clicks`, other tasks count them into `counts`, and the main program adds the counts up. A counting task
commits its offsets after it has sent its counts. Killed in between, it sends some counts again, so the sum takes the
last count of each page.
"""

from __future__ import annotations

import json
import sys

import pyarrow as pa
import ray

import raymq

PAGES, MAKERS, CLICKS, QUEUES = 10, 4, 5_000, 4


@ray.remote(num_cpus=0.5, max_retries=3)
def make_clicks(cluster: raymq.Cluster, maker: int) -> int:
    """Send the clicks of one maker as columns: one batch, without an object per message."""
    pages = [b"page-%d" % ((maker + click) % PAGES) for click in range(CLICKS)]
    rows = pa.record_batch({"body": pa.array([b"click"] * CLICKS), "key": pa.array(pages)})
    with cluster.producer() as producer:
        receipts = [future.result(timeout=60) for future in producer.send_batch("clicks", rows)]
    return sum(receipt.count for receipt in receipts)


@ray.remote(num_cpus=0.5, max_retries=3)
def count_clicks(cluster: raymq.Cluster, queue_id: int) -> int:
    """Count the clicks of each page of one queue. A page is always in the same queue."""
    end = cluster.describe_topic("clicks")["queues"][queue_id]["max_offset"]
    counts: dict[bytes, int] = {}

    with (
        cluster.consumer(
            "clicks", group="counters", start="earliest", queues=[queue_id]
        ) as consumer,
        cluster.producer(codec="json") as producer,
    ):
        while consumer.position(queue_id) < end:
            batch = consumer.poll_batch(timeout=10)
            for entry in batch.column("key").value_counts().to_pylist():
                counts[entry["values"]] = counts.get(entry["values"], 0) + entry["counts"]

        for page, count in counts.items():
            producer.send("counts", {"page": page.decode(), "clicks": count}, key=page)
        producer.flush()
        # After the counts: a task that dies before this line starts again at the same offsets.
        consumer.commit()
    return len(counts)


def main() -> None:
    """Run both stages and check the sum."""
    with raymq.start(sys.argv[1] if len(sys.argv) > 1 else "raymq-pipeline") as cluster:
        cluster.create_topic("clicks", queues=QUEUES)
        cluster.create_topic("counts", queues=1)
        ray.init(cluster.ray_address, ignore_reinit_error=True)
        made = sum(ray.get([make_clicks.remote(cluster, maker) for maker in range(MAKERS)]))
        ray.get([count_clicks.remote(cluster, queue) for queue in range(QUEUES)])
        totals: dict[str, int] = {}
        with cluster.consumer("counts", start="earliest") as consumer:
            while len(totals) < PAGES:
                totals |= {m.value["page"]: m.value["clicks"] for m in consumer.poll(timeout=10)}
    print(json.dumps({"clicks": made, "counted": sum(totals.values()), "pages": len(totals)}))
    if made != sum(totals.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
