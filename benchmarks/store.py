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
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.floors import at_least, at_most
from benchmarks.limits import BODY, append_all, batch_of, call_ms, cleared, output_of
from benchmarks.rounds import Rounds, Row, in_turn, run, tell
from raymq.store.config.promise import Flush
from raymq.store.config.store_config import StoreConfig
from raymq.store.embedded.embedded_store import EmbeddedStore
from raymq.store.engine.message_store import MessageStore
from raymq.store.records.requests import PutRequest
from tests.support import oracle

BATCH_ROWS = (256, 512, 900)
#: rows of the batches that are read
READ_ROWS = 900
IN_FLIGHT = 8
PARTS = ("puts", "reads", "recovery")
#: messages of the stores that are recovered
COUNTS, LARGEST = (1_000, 100_000, 1_000_000), 10_000_000
QUEUES = 4
#: log bytes of one message of these benchmarks, about
RECORD = BODY + 110
#: how often batches are measured in a round, and each size of them before
TURNS = 3
ASYNC = StoreConfig(flush="async")
#: left to others on the disk
FREE_BYTES_MIN = 3 << 30
#: the last one as RocketMQ's own scripts have it: else no file can be locked in memory
JAVA = "-Xms1g -Xmx2g -XX:MaxDirectMemorySize=4g --add-exports=java.base/sun.nio.ch=ALL-UNNAMED"


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

    def run(self, what: str, root: Path, flush: str, count: int, rows: int = 1) -> float:
        """Milliseconds of one figure."""
        words = [self._java, *JAVA.split(), f"-Duser.home={self._home}"]
        words += [f"-Drmq.logback.configurationFile={oracle.SOURCES / 'logback.xml'}"]
        words += ["-cp", self._class_path, "StoreBench"]
        words += [what, str(root), f"{flush.upper()}_FLUSH", str(count), str(BODY), str(rows)]
        return 1000 * float(json.loads(output_of(words).splitlines()[-1])["seconds"])


# --- ours -----------------------------------------------------------------------------------------


def keyed_batch(rows: int) -> pa.RecordBatch:
    """Random bodies, and keys k0, k1, ..."""
    plain = batch_of(rows, BODY)
    keys = pa.array([b"KEYS\x01k%d\x02" % row for row in range(rows)], pa.binary())
    born = pa.array(np.full(rows, time.time_ns() // 1_000_000))
    return pa.record_batch([plain["body"], plain["tag"], keys, born], schema=plain.schema)


def open_store(root: Path, flush: Flush, *, warm: bool = False) -> EmbeddedStore:
    """A store with topic t, and with warm files if `warm`."""
    store = EmbeddedStore(root, config=StoreConfig(flush=flush, warm_mapped_file=warm))
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
    requests = (
        PutRequest("t", number % QUEUES, batch, None, 0, 0, "quorum")
        for number in range(-(-count // rows))
    )
    append_all(store, requests, IN_FLIGHT)
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


# --- rounds ---------------------------------------------------------------------------------------


class Bench:
    """One directory, both engines; a call measures each of its figures once."""

    def __init__(self, directory: Path, rocketmq: RocketMQ, rounds: Rounds, *, quick: bool) -> None:
        self.directory = directory
        self.rocketmq = rocketmq
        self.rounds = rounds
        self.count = 100_000 if quick else 400_000

    def fresh(self, name: str) -> Path:
        """An empty directory for one store."""
        return cleared(self.directory / name)

    def note(self, name: str, ours_ms: float, theirs_ms: float, count: int) -> None:
        """Rates of both."""
        rate = self.rounds.note(f"{name}_msg_s", 1000 * count / ours_ms)
        their_rate = self.rounds.note(f"rocketmq_{name}_msg_s", 1000 * count / theirs_ms)
        tell(f"  {name}: {rate:,.0f}/s, RocketMQ {their_rate:,.0f}/s")

    def ours(self, flush: Flush, count: int, work: Callable[[EmbeddedStore, int], object]) -> float:
        """`work` on a fresh store, a quarter of it not measured (as StoreBench's)."""
        store = open_store(self.fresh("ours"), flush, warm=True)
        try:
            work(store, count // 4)
            return call_ms(lambda: work(store, count), 1)
        finally:
            store.close()

    def best_rows(self) -> tuple[int, int]:
        """Rows of a batch, of ours and of RocketMQ's, that were quickest: the best of three turns each."""
        count = self.count // 2
        ours, theirs = [], []
        for rows in BATCH_ROWS * TURNS:
            ours.append(self.ours("sync", count, partial(append, rows=rows)))
            root = self.fresh("rocketmq")
            theirs.append(self.rocketmq.run("append", root, "sync", count, rows))
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

    def written(self, name: str) -> Path:
        """A store that we wrote. Each engine reads its own, because an open store is changed."""
        root = self.fresh(name)
        store = open_store(root, "async")
        append(store, self.count, READ_ROWS)
        store.close()
        return root

    def reads(self) -> None:
        """A store that we wrote, read by both: a queue to its end, and by key."""
        count, queries = self.count // QUEUES, 2000
        theirs = self.written("rocketmq")
        read_ms = self.rocketmq.run("read", theirs, "async", count)
        query_ms = self.rocketmq.run("query", theirs, "async", queries, READ_ROWS)

        store = EmbeddedStore(self.written("ours"), config=ASYNC)
        read(store, count // 4)
        self.note("read", call_ms(lambda: read(store, count), 1), read_ms, count)
        query(store, queries // 4, READ_ROWS)
        ours_ms = call_ms(lambda: query(store, queries, READ_ROWS), 1)
        self.note("query", ours_ms, query_ms, queries)
        store.close()

    def recoveries(self, counts: Sequence[int]) -> None:
        """A store of ours that died with so many messages, opened by us and, as it then is, by RocketMQ.

        Our recovery leaves it a crashed store; the largest would not fit the disk twice.
        """
        for name in ("ours", "rocketmq"):
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
            ours = call_ms(lambda at=root: MessageStore.open(at, config=ASYNC).abandon(), 1)
            theirs = self.rocketmq.run("recover", root, "async", 0)

            # Now a store that RocketMQ wrote itself: it appends a quarter more than asked, and halts.
            own = self.fresh("crashed")
            self.rocketmq.run("append", own, "async", count * 4 // 5, min(count, 900))
            theirs_own = self.rocketmq.run("recover", own, "async", 0)

            for peer, ms in (("", ours), ("rocketmq_", theirs), ("rocketmq_own_", theirs_own)):
                self.rounds.note(f"{peer}recover_{count}_ms", ms)
                tell(f"  {peer}recover_{count}: {ms:,.0f} ms")


def measure(options: argparse.Namespace, rounds: Rounds) -> None:
    """The parts that are wanted."""
    directory = options.directory / "store"
    cache = directory / "java"
    cache.mkdir(parents=True, exist_ok=True)
    bench = Bench(directory, RocketMQ(cache), rounds, quick=options.quick)
    counts = COUNTS[::2] if options.quick else (*COUNTS, LARGEST)

    try:
        if "puts" in options.only:
            rows, their_rows = bench.best_rows()
            tell(f"best batches: ours {rows} messages, RocketMQ's {their_rows}")
        for number in in_turn():
            if "puts" in options.only:
                bench.puts(rows, their_rows)
            if "reads" in options.only:
                bench.reads()
            if "recovery" in options.only:
                # The largest once: it takes a minute and 12 GB.
                bench.recoveries([count for count in counts if not number or count != LARGEST])
    finally:
        shutil.rmtree(directory, ignore_errors=True)


PEER = "RocketMQ"
ROWS = [
    Row("durable batches, 1 KiB", "append_msg_s", "rocketmq_append_msg_s", PEER, at_least(3)),
    Row("single async puts, 1 KiB", "single_msg_s", "rocketmq_single_msg_s", PEER, at_least(1)),
    Row("sequential read, checksummed", "read_msg_s", "rocketmq_read_msg_s", PEER, at_least(1)),
    Row("queries by key", "query_msg_s", "rocketmq_query_msg_s", PEER, at_least(0.5)),
]
for count in (*COUNTS, LARGEST):
    what, name = f"recovery of {count:,} messages", f"recover_{count}_ms"
    ROWS += [
        Row(f"{what}, of one store", name, f"rocketmq_{name}", PEER, at_most(1)),
        Row(f"{what}, each of its own store", name, f"rocketmq_own_{name}", PEER, at_most(1)),
    ]

if __name__ == "__main__":
    run(__doc__, measure, ROWS, parts=PARTS)
