"""What does a catch-up read cost? `python -m benchmarks.read [--quick] [--check] [--json FILE]`

A consumer reads a backlog of 1 KiB messages from its first offset, as Arrow batches and as objects. The client compares
each record with its CRC. The price of that is measured by turns: a read with the comparison, a read without it. A plain
read of the same log files is the limit.

Each figure is a median of the rounds, a ratio the median of the rounds' ratios. The comparison may cost 15 %. The floor
leaves two hundredths for the noise of shared machines.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from unittest.mock import patch

import raymq
from benchmarks import floors
from benchmarks.floors import Line, at_least
from benchmarks.put import Rounds, batch_of
from raymq.client.consume import shard_reader

ROUNDS = 7
BODY = 1024
ROWS = 900
TOPIC = "backlog"


def fill(cluster: raymq.Cluster, count: int) -> None:
    """Send so many batches."""
    cluster.create_topic(TOPIC, queues=1)
    data = batch_of(ROWS, BODY).select(["body"])
    with cluster.producer() as producer:
        for _ in range(count):
            producer.send_batch(TOPIC, data, queue_id=0)


def batch_rate(cluster: raymq.Cluster, messages: int) -> float:
    """Messages a second by `poll_batch`."""
    with cluster.consumer(TOPIC, start="earliest") as consumer:
        # The first answer opens the stream.
        read = consumer.poll_batch(timeout=10).num_rows
        first, begin = read, time.perf_counter()
        while read < messages:
            read += consumer.poll_batch(timeout=10).num_rows
        return (read - first) / (time.perf_counter() - begin)


def object_rate(cluster: raymq.Cluster, messages: int) -> float:
    """Messages a second by `poll`, whose bodies are looked at."""
    with cluster.consumer(TOPIC, start="earliest") as consumer:
        read = len(consumer.poll(max_records=500, timeout=10))
        first, begin = read, time.perf_counter()
        while read < messages:
            for message in consumer.poll(max_records=500, timeout=10):
                read += 1
                len(message.body)
        return (read - first) / (time.perf_counter() - begin)


def file_rate(directory: Path, messages: int) -> float:
    """Messages a second that a plain read of the log files passes."""
    (root,) = directory.glob("**/commitlog")
    left = messages * BODY
    begin = time.perf_counter()
    for path in sorted(root.iterdir()):
        with path.open("rb", buffering=0) as file:
            while left > 0 and (piece := file.read(min(left, 1 << 20))):
                left -= len(piece)
    return messages / (time.perf_counter() - begin)


def measure(cluster: raymq.Cluster, directory: Path, messages: int, rounds: Rounds) -> None:
    """One round: each figure once, with the comparison of CRCs and without."""
    rounds.note("file_msg_s", file_rate(directory, messages))
    for name, rate in (("batches", batch_rate), ("objects", object_rate)):
        rounds.note(f"{name}_msg_s", rate(cluster, messages))
        with patch.object(shard_reader, "verify_slices", lambda found, *_: found):
            rounds.note(f"{name}_unchecked_msg_s", rate(cluster, messages))


def run(directory: Path, *, quick: bool) -> Rounds:
    """All rounds."""
    rounds = Rounds()
    count = 100 if quick else 400
    data = directory / "read"
    shutil.rmtree(data, ignore_errors=True)
    with raymq.start(data, name="bench-read") as cluster:
        fill(cluster, count)
        batch_rate(cluster, count * ROWS)
        for number in range(ROUNDS):
            print(f"  round {number + 1} of {ROUNDS}", file=sys.stderr, flush=True)
            measure(cluster, data, count * ROWS, rounds)
    shutil.rmtree(data, ignore_errors=True)
    return rounds


def table(rounds: Rounds) -> list[Line]:
    """The figures, with their limits and floors."""
    lines = []
    limit = rounds.median("file_msg_s")
    lines.append(Line("plain read of the files", f"{limit:,.0f} msg/s", remark="limit"))
    for name in ("batches", "objects"):
        share = rounds.ratio(f"{name}_msg_s", "file_msg_s")
        checked = rounds.ratio(f"{name}_msg_s", f"{name}_unchecked_msg_s")
        figure = f"{rounds.median(f'{name}_msg_s'):,.0f} msg/s"
        lines += [
            Line(f"catch-up read of {name}", figure, f"{share:.2f} of the plain read"),
            Line(
                f"catch-up read of {name}, CRCs compared",
                f"{checked:.2f} of without",
                "",
                at_least(0.83),
                checked,
            ),
        ]
    return lines


def main() -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a shorter backlog")
    parser.add_argument("--directory", type=Path, default=Path.home() / ".raymq" / "bench")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    floors.options(parser)
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    rounds = run(options.directory, quick=options.quick)
    if options.json:
        options.json.write_text(json.dumps(rounds.all(), indent=1))
    sys.exit(floors.report(table(rounds), check=options.check))


if __name__ == "__main__":
    main()
