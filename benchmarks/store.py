"""How fast is the engine, compared with RocketMQ's own?

`python -m benchmarks.store [--quick] [--check] [--only PART] [--json FILE]`

RocketMQ 5.3.3's DefaultMessageStore and our EmbeddedStore do the same on equal settings, one right after the other in
each of three rounds. Bodies have 1 KiB, files 1 GiB, the index is on, and appended batches have a key a message. Each
engine has its best batch of at most 1 MiB, found before. Both first do a quarter of the work that is not measured. Puts
are measured until the last one is acknowledged and consume queues and index have all of them. A ratio is the median of
the rounds' ratios. Batches have three turns a round, because they are so quick that other load disturbs them most.
Needs Java 17 and Maven.

Writers have warm files, both as RocketMQ's warmMapedFileEnable has it: written with zeros and locked in memory, before
the first put that counts. Without it the figures say how a machine gives memory, not how an engine writes. On a machine
that returns free pages to its host, the first touch of a page costs up to 12 us. That is ten times the cost of a put.

Recovery is `MessageStore.open` here and `load()` there. It is measured twice: of the same directory, left by a store
of ours that died, and of a directory that each engine wrote itself before it died. Both open all files, find the end
of the log, and bring consume queues and index to it as far as a start waits for that. Afterwards puts and reads are
answered, but for the threads: neither starts any. The start of the process is not counted either. RocketMQ dispatches
some messages once more within this time. Ours has dispatched them before it died.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from benchmarks import floors
from benchmarks.floors import Line, at_least, at_most
from benchmarks.put import ROUNDS, Rounds
from raymq.store.base.files import Files
from raymq.store.config.store_config import StoreConfig
from raymq.store.embedded.embedded_store import EmbeddedStore
from raymq.store.engine.message_store import MessageStore
from raymq.store.records import record
from raymq.store.records.requests import PutRequest
from tests.support import oracle

BODY = 1024
BATCH_ROWS = (256, 512, 900)
IN_FLIGHT = 8
#: keys of one call, if it asks for several
KEYS = 256
PARTS = ("puts", "reads", "recovery")
QUEUES = 4
#: log bytes of one message of these benchmarks, about
RECORD = BODY + 110
#: how often batches are measured in a round, and each size of them before
TURNS = 3
#: left to others on the disk
FREE_BYTES_MIN = 3 << 30
#: the last one as RocketMQ's own scripts have it: else no file can be locked in memory
JAVA = (
    "-Xms1g",
    "-Xmx2g",
    "-XX:MaxDirectMemorySize=4g",
    "--add-exports=java.base/sun.nio.ch=ALL-UNNAMED",
)


class Spent(NamedTuple):
    """Time of all threads and children."""

    seconds: float
    cpu_seconds: float


def spend(work: Callable[[], object]) -> Spent:
    """Run it."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    begin = time.perf_counter()
    work()
    seconds = time.perf_counter() - begin
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Spent(seconds, cpu)


# --- RocketMQ -------------------------------------------------------------------------------------


class RocketMQ:
    """benchmarks/java/StoreBench in a JVM of its own for each figure."""

    def __init__(self, cache: Path) -> None:
        program = oracle.prepare(cache)
        source = Path(__file__).parent / "java" / "StoreBench.java"
        classes = cache / "bench"
        classes.mkdir(exist_ok=True)
        words = [oracle.find("javac"), "--release", "17", "-nowarn", "-proc:none"]
        words += ["-d", str(classes), "-cp", program.class_path, str(source)]
        subprocess.run(words, check=True)
        self._java = program.java
        self._class_path = f"{classes}{os.pathsep}{program.class_path}"
        self._home = cache

    def run(self, what: str, root: Path, flush: str, count: int, rows: int = 1) -> Spent:
        """One figure."""
        words = [self._java, *JAVA, f"-Duser.home={self._home}"]
        words += [f"-Drmq.logback.configurationFile={oracle.SOURCES / 'logback.xml'}"]
        words += ["-cp", self._class_path, "StoreBench"]
        words += [what, str(root), f"{flush.upper()}_FLUSH", str(count), str(BODY), str(rows)]
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        return Spent(found["seconds"], found["cpu_seconds"])


# --- ours -----------------------------------------------------------------------------------------


def keyed_batch(rows: int) -> pa.RecordBatch:
    """Random bodies, and keys k0, k1, ..."""
    data = np.random.default_rng(1).bytes(rows * BODY)
    offsets = pa.py_buffer(np.arange(0, (rows + 1) * BODY, BODY, dtype=np.int32))
    columns = [
        pa.Array.from_buffers(pa.binary(), rows, [None, offsets, pa.py_buffer(data)]),
        pa.nulls(rows, pa.string()),
        pa.array([b"KEYS\x01k%d\x02" % row for row in range(rows)], pa.binary()),
        pa.array(np.full(rows, time.time_ns() // 1_000_000)),
    ]
    return pa.record_batch(columns, schema=record.PUT_SCHEMA)


def open_store(root: Path, flush: str, *, warm: bool = False) -> EmbeddedStore:
    """A store with topic t, and with warm files if `warm`."""
    config = StoreConfig(flush="sync" if flush == "sync" else "async", warm_mapped_file=warm)
    store = EmbeddedStore(root, config=config)
    store.create_topic("t", QUEUES)
    allocator = store.store.log.allocator
    while warm and not allocator.caught_up:
        if allocator.last_error is not None:
            raise SystemExit(f"no warm files: {allocator.last_error}")
        time.sleep(0.05)
    return store


def append(store: EmbeddedStore, count: int, rows: int) -> None:
    """Batches, some on their way at a time, and all acknowledged, dispatched and indexed at the end."""
    batch = keyed_batch(rows)
    waiting = []
    for number in range(-(-count // rows)):
        request = PutRequest("t", number % QUEUES, batch, None, 0, 0, "quorum")
        waiting.append(store.append(request))
        if len(waiting) == IN_FLIGHT:
            store.wait(waiting.pop(0))
    for appended in waiting:
        store.wait(appended)
    store.await_index()


def single(store: EmbeddedStore, count: int) -> None:
    """Messages one by one; no put waits for the one before."""
    puts = store.async_put()
    body = os.urandom(BODY)
    for number in range(count):
        last = puts.put("t", number % QUEUES, body)
    last.result()
    puts.close()
    store.await_index()


def read(store: EmbeddedStore, count: int) -> None:
    """Queue 0 to its end. `fetch` compares every body byte with the record's CRC."""
    offset, end = store.store.queue_range("t", 0)
    end = min(end, offset + count)
    while offset < end:
        part = store.fetch("t", 0, offset, max_bytes=1 << 20)
        if part.records is None or len(part.records) != part.next_offset - offset:
            raise SystemExit(f"not all of [{offset}, {part.next_offset}) was read")
        offset = part.next_offset


def query(store: EmbeddedStore, count: int, keys: int) -> None:
    """Query keys in turn, one a call, for raw records, as RocketMQ returns them."""
    for number in range(count):
        hits = store.store.query.by_keys("t", [f"k{number * 7919 % keys}"], max_num=32)
        if not len(hits.records):
            raise SystemExit(f"key {number * 7919 % keys} has no message")


def query_many(store: EmbeddedStore, count: int, keys: int) -> None:
    """Keys in turn, many a call, which RocketMQ has no call for."""
    for first in range(0, count, KEYS):
        asked = [f"k{number * 7919 % keys}" for number in range(first, first + KEYS)]
        hits = store.store.query.by_keys("t", asked, max_num=32)
        if len(set(hits.keys.tolist())) != len(asked):
            raise SystemExit(f"a key of {asked} has no message")


def recover(root: Path) -> None:
    """Open a store that died, and let go of it."""
    MessageStore.open(root, config=StoreConfig(flush="async")).abandon()


def tell(line: str) -> None:
    """Progress, at once."""
    print(f"    {line}", file=sys.stderr, flush=True)


# --- rounds ---------------------------------------------------------------------------------------


class Bench:
    """One directory, both engines; a call measures each of its figures once."""

    def __init__(self, directory: Path, rocketmq: RocketMQ, *, quick: bool) -> None:
        self.directory = directory
        self.rocketmq = rocketmq
        self.rounds = Rounds()
        self.count = 100_000 if quick else 400_000

    def fresh(self, name: str) -> Path:
        """An empty directory for one store."""
        root = self.directory / name
        shutil.rmtree(root, ignore_errors=True)
        return root

    def note(self, name: str, ours: Spent, theirs: Spent, count: int) -> None:
        """Rates and CPU of both."""
        gigabytes = count * RECORD / 1e9
        for side, spent in (("", ours), ("rocketmq_", theirs)):
            self.rounds.note(f"{side}{name}", count / spent.seconds)
            self.rounds.note(f"{side}{name}_cpu", spent.cpu_seconds / gigabytes)
        tell(f"{name}: {count / ours.seconds:,.0f}/s, RocketMQ {count / theirs.seconds:,.0f}/s")

    def ours(self, flush: str, count: int, work: Callable[[EmbeddedStore, int], object]) -> Spent:
        """`work` on a fresh store, a quarter of it not measured (as StoreBench's)."""
        store = open_store(self.fresh("ours"), flush, warm=True)
        try:
            work(store, count // 4)
            return spend(lambda: work(store, count))
        finally:
            store.close()

    def best_rows(self) -> tuple[int, int]:
        """Rows of a batch, of ours and of RocketMQ's, that were quickest: the best of three turns each."""
        count = self.count // 2
        ours, theirs = [], []
        for rows in BATCH_ROWS * TURNS:
            ours.append(self.ours("sync", count, partial(append, rows=rows)).seconds)
            root = self.fresh("rocketmq")
            theirs.append(self.rocketmq.run("append", root, "sync", count, rows).seconds)
        best = len(BATCH_ROWS)
        return BATCH_ROWS[int(np.argmin(ours)) % best], BATCH_ROWS[int(np.argmin(theirs)) % best]

    def puts(self, rows: int, their_rows: int) -> None:
        """Durable batches, asynchronous single messages."""
        batches = partial(append, rows=rows)
        for turn in range(TURNS):
            # The other one first in every other turn.
            ours = self.ours("sync", self.count, batches) if turn % 2 else None
            root = self.fresh("rocketmq")
            theirs = self.rocketmq.run("append", root, "sync", self.count, their_rows)
            ours = ours or self.ours("sync", self.count, batches)
            self.note("append", ours, theirs, self.count)
        count = self.count // 2
        theirs = self.rocketmq.run("single", self.fresh("rocketmq"), "async", count)
        ours = self.ours("async", count, single)
        self.note("single", ours, theirs, count)

    def reads(self) -> None:
        """One store that we wrote, read by both: a queue to its end, and by key."""
        root, rows = self.fresh("shared"), 900
        store = open_store(root, "async")
        append(store, self.count, rows)
        store.close()

        count = self.count // QUEUES
        theirs = self.rocketmq.run("read", self.copy(root), "async", count)
        store = EmbeddedStore(root, config=StoreConfig(flush="async"))
        read(store, count // 4)
        self.note("read", spend(lambda: read(store, count)), theirs, count)

        count = 2000
        theirs = self.rocketmq.run("query", self.copy(root), "async", count, rows)
        for name, work in (("query", query), ("query_many", query_many)):
            work(store, count // 4, rows)
            self.note(name, spend(partial(work, store, count, rows)), theirs, count)
        store.close()

    def recoveries(self, counts: Sequence[int]) -> None:
        """A store of ours that died with so many messages, opened by us and, as it then is, by RocketMQ.

        Our recovery leaves it a crashed store; the largest would not fit the disk twice.
        """
        for name in ("ours", "rocketmq", "shared", "copy"):
            self.fresh(name)

        for count in counts:
            root = self.fresh("crashed")
            needed = count * RECORD + FREE_BYTES_MIN
            if shutil.disk_usage(self.directory).free < needed:
                tell(f"recover_{count}: left out, {needed / 1e9:.0f} GB of disk are not free")
                continue

            store = open_store(root, "async")
            append(store, count, min(count, 900))
            store.abandon()
            ours = spend(partial(recover, root))
            theirs = self.rocketmq.run("recover", root, "async", 0)

            # Now a store that RocketMQ wrote itself: it appends a quarter more than asked, and halts.
            own = self.fresh("crashed")
            self.rocketmq.run("append", own, "async", count * 4 // 5, min(count, 900))
            theirs_own = self.rocketmq.run("recover", own, "async", 0)

            self.rounds.note(f"recover_{count}", ours.seconds)
            self.rounds.note(f"rocketmq_recover_{count}", theirs.seconds)
            self.rounds.note(f"rocketmq_own_recover_{count}", theirs_own.seconds)
            tell(
                f"recover_{count}: {ours.seconds:.3f} s, RocketMQ {theirs.seconds:.3f} s, "
                f"of its own {theirs_own.seconds:.3f} s"
            )

    def copy(self, root: Path) -> Path:
        """The same store for the other engine. Blocks that were never written are not: `cp` would read all of them.

        Bytes that were read are in memory then, and recovery could no longer distinguish them from written ones.
        """
        target, files = self.fresh("copy"), Files()
        target.mkdir(parents=True)
        for path in sorted(root.rglob("*")):
            copy = target / path.relative_to(root)
            if path.is_dir():
                copy.mkdir()
                continue

            with path.open("rb") as source, copy.open("wb") as file:
                size = path.stat().st_size
                file.truncate(size)
                for start, stop in files.data_ranges(source.fileno(), 0, size):
                    source.seek(start)
                    file.seek(start)
                    while file.tell() < stop:
                        file.write(source.read(min(stop - file.tell(), 1 << 20)))

        return target


def table(rounds: Rounds, counts: tuple[int, ...]) -> list[Line]:
    """Our figures and RocketMQ's, with the floors of the ratios."""
    lines = []
    for name, what, floor in (
        ("append", "durable batches, 1 KiB", at_least(3)),
        ("single", "single async puts, 1 KiB", at_least(1)),
        ("read", "sequential read, checksummed", at_least(1)),
        ("query", "queries by key, one a call", at_least(0.5)),
        ("query_many", f"  {KEYS} a call, beside one", None),
    ):
        if name not in rounds.all():
            continue

        ours, theirs = rounds.median(name), rounds.median(f"rocketmq_{name}")
        ratio = rounds.ratio(name, f"rocketmq_{name}")
        beside = f"{ratio:.2f} x RocketMQ's {theirs:,.0f}/s"
        lines.append(Line(what, f"{ours:,.0f}/s", beside, floor, ratio))
        cpu, their_cpu = rounds.median(f"{name}_cpu"), rounds.median(f"rocketmq_{name}_cpu")
        if name in ("append", "single", "read"):
            lines.append(Line("  CPU seconds a GB", f"{cpu:.2f}", f"RocketMQ {their_cpu:.2f}"))

    for count in counts:
        for of, whose in (("", "of one store"), ("own_", "each of its own store")):
            name, peer = f"recover_{count}", f"rocketmq_{of}recover_{count}"
            if peer not in rounds.all():
                continue
            ratio = rounds.ratio(name, peer)
            lines.append(
                Line(
                    f"recovery of {count:,} messages, {whose}",
                    f"{rounds.median(name) * 1000:,.0f} ms",
                    f"{ratio:.2f} x RocketMQ's {rounds.median(peer) * 1000:,.0f} ms",
                    at_most(1),
                    ratio,
                )
            )

    return lines


def main() -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a quarter of the messages")
    parser.add_argument(
        "--only", choices=PARTS, action="append", help="some of it; may be repeated"
    )
    parser.add_argument("--directory", type=Path, default=Path.home() / ".raymq" / "bench")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    floors.options(parser)
    options = parser.parse_args()

    directory = options.directory / "store"
    cache = directory / "java"
    cache.mkdir(parents=True, exist_ok=True)
    bench = Bench(directory, RocketMQ(cache), quick=options.quick)
    counts = (1_000, 1_000_000) if options.quick else (1_000, 100_000, 1_000_000, 10_000_000)
    parts = options.only or PARTS

    try:
        if "puts" in parts:
            rows, their_rows = bench.best_rows()
            print(f"best batches: ours {rows} messages, RocketMQ's {their_rows}", file=sys.stderr)
        for number in range(ROUNDS):
            print(f"  round {number + 1} of {ROUNDS}", file=sys.stderr, flush=True)
            if "puts" in parts:
                bench.puts(rows, their_rows)
            if "reads" in parts:
                bench.reads()
            if "recovery" in parts:
                # The largest once: it takes a minute and 12 GB.
                bench.recoveries([count for count in counts if not number or count <= 1_000_000])
    finally:
        shutil.rmtree(directory, ignore_errors=True)

    if options.json:
        figures = {"cores": os.cpu_count(), "rounds": bench.rounds.all()}
        options.json.write_text(json.dumps(figures, indent=1))
    sys.exit(floors.report(table(bench.rounds, counts), check=options.check))


if __name__ == "__main__":
    main()
