"""What does each mode cost, and what does it promise? `python -m benchmarks.modes [--quick] [--json FILE]`

Four clusters of one shard run in one Ray: flush sync or async, transient pool off or on. Puts go through Flight. In
each of three rounds the modes take turns. Each figure has a limit, measured in the same round: the cost of writing the
same bytes to the place where the mode acknowledges them, after a Flight echo in another process. That place is
pre-written blocks with pwrite + fdatasync for sync, a file with pwrite for async, and /dev/shm with the pool.

"At risk" are the bytes that are acknowledged and not synced right after a burst: a power loss takes them. A kill of any
process takes nothing in any mode, as tests/ray/test_modes.py shows.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections import deque
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import raymq
from benchmarks.put import (
    LARGE,
    ROUNDS,
    Rounds,
    await_prewritten,
    batch_of,
    echo_client,
    flight_echo,
    grouping,
    raw_limit,
    serial_ms,
    syncs_of,
)
from raymq.client.produce.batch_sender import BatchSender
from raymq.client.transport.routes import Routes
from raymq.store.config.promise import Flush
from raymq.store.config.store_config import StoreConfig
from raymq.store.log.flush import PAGE_BYTES
from raymq.store.records.record import PUT_SCHEMA

#: bytes of a large batch as it is stored, and of one message
BLOCK_BYTES, RECORD_BYTES = 1140 * 1024, 1150
#: batches under way towards the echo, as many as a BatchSender has
ECHO_WINDOW = 32
PRODUCERS = (1, 16)
#: less is not synced before the thorough interval
FLUSH_LEAST_BYTES = StoreConfig().flush_least_pages * PAGE_BYTES


class Mode(NamedTuple):
    """One of the four."""

    name: str
    flush: Flush
    pool: bool
    #: the meaning of a receipt
    promise: str


MODES = [
    Mode("sync", "sync", False, "on the disk"),
    Mode("sync-pool", "sync", True, "on the disk (committed, then synced)"),
    Mode("async", "async", False, "in the page cache; synced within 0.5 s, or 10 s if few"),
    Mode("async-pool", "async", True, "in shared memory; committed within 0.2 s, synced as async"),
]


# --- limits ---------------------------------------------------------------------------------------


def memory_limit(directory: Path, block_bytes: int, count: int) -> float:
    """Blocks a second: pwrite, one after the other, into pages that are there. Nothing is synced."""
    block = os.urandom(block_bytes)
    with tempfile.TemporaryFile(dir=directory) as file:
        for index in range(count):
            os.pwrite(file.fileno(), block, index * block_bytes)
        begin = time.perf_counter()
        for index in range(count):
            os.pwrite(file.fileno(), block, index * block_bytes)
        return count / (time.perf_counter() - begin)


def flight_limit(count: int) -> float:
    """Large batches a second through an open stream to a process that only answers."""
    batch = batch_of(*LARGE)
    with echo_client(apart=False) as (client, _):
        import pyarrow.flight as flight

        writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(b"echo"))
        writer.begin(PUT_SCHEMA)
        room = threading.Semaphore(ECHO_WINDOW)

        def answers() -> None:
            for _ in range(count):
                reader.read_chunk()
                room.release()

        thread = threading.Thread(target=answers)
        begin = time.perf_counter()
        thread.start()
        for _ in range(count):
            room.acquire()
            writer.write_with_metadata(batch, b"{}")
        thread.join()
        seconds = time.perf_counter() - begin
        writer.close()
    return count / seconds


# --- one mode -------------------------------------------------------------------------------------


class Burst(NamedTuple):
    """The result of a burst of large batches."""

    messages_s: float
    #: right after it: acknowledged and not synced, acknowledged and not committed
    at_risk_bytes: int
    in_pool_bytes: int


def burst(cluster: raymq.Cluster, count: int) -> Burst:
    """Large batches, each acknowledged as the mode promises."""
    batch = batch_of(*LARGE)
    await_prewritten(cluster)
    sender = BatchSender(Routes.of(cluster))
    for future in [sender.send("t", 0, batch) for _ in range(ECHO_WINDOW)]:
        future.result(60)

    begin = time.perf_counter()
    under_way = deque(sender.send("t", 0, batch) for _ in range(count))
    while under_way:
        under_way.popleft().result(120)
    seconds = time.perf_counter() - begin

    # All bytes are acknowledged, so a power loss would take those that are not synced now.
    facts = cluster.status()["shards"][0]
    sender.close()
    return Burst(
        count * LARGE[0] / seconds,
        facts["appended"] - facts["synced"],
        facts["appended"] - facts["committed"],
    )


def messages_per_fsync(cluster: raymq.Cluster, producers: int, count: int) -> float:
    """Messages a sync, with producers that each send one message at a time. The syncs after the last ack count too."""
    before = syncs_of(cluster)
    grouping(cluster, producers, count)
    while True:
        facts = cluster.status()["shards"][0]
        if facts["appended"] - facts["synced"] < FLUSH_LEAST_BYTES:
            return producers * count / max(1, syncs_of(cluster) - before)
        time.sleep(0.05)


def measure(cluster: raymq.Cluster, mode: Mode, rounds: Rounds, *, quick: bool) -> None:
    """One round of one mode."""
    found = burst(cluster, 40 if quick else 150)
    rounds.note(f"{mode.name}_msg_s", found.messages_s)
    rounds.note(f"{mode.name}_at_risk_bytes", found.at_risk_bytes)
    rounds.note(f"{mode.name}_in_pool_bytes", found.in_pool_bytes)
    await_prewritten(cluster)
    p50, p99 = serial_ms(cluster, 200 if quick else 2000)
    rounds.note(f"{mode.name}_p50_ms", p50)
    rounds.note(f"{mode.name}_p99_ms", p99)
    for producers in PRODUCERS:
        share = messages_per_fsync(cluster, producers, 40 if quick else 100)
        rounds.note(f"{mode.name}_msgs_per_fsync_{producers}", share)


def limits(directory: Path, rounds: Rounds, *, quick: bool) -> None:
    """One round of the limits of the modes: batches in messages a second, one message in milliseconds."""
    count, serial = (40, 200) if quick else (150, 2000)
    memory = Path("/dev/shm")
    flight = rounds.note("flight_msg_s", flight_limit(count) * LARGE[0])
    echo = rounds.note("flight_echo_ms", flight_echo(1024, serial).p50_ms)

    for mode in MODES:
        if mode.flush == "sync":
            batches = raw_limit(directory, BLOCK_BYTES, count)
            single = raw_limit(directory, RECORD_BYTES, serial)
        else:
            target = memory if mode.pool else directory
            batches = memory_limit(target, BLOCK_BYTES, count)
            single = memory_limit(target, RECORD_BYTES, serial)

        place_msg_s = rounds.note(f"{mode.name}_place_msg_s", batches * LARGE[0])
        # The slower of the two: the way there, or the target.
        rounds.note(f"{mode.name}_limit_msg_s", min(flight, place_msg_s))
        rounds.note(f"{mode.name}_limit_ms", echo + 1000 / single)


# --- the run --------------------------------------------------------------------------------------


def run(directory: Path, *, quick: bool) -> Rounds:
    """All modes in one Ray. The modes take turns within a round."""
    rounds = Rounds()
    with ExitStack() as running:
        clusters: dict[str, raymq.Cluster] = {}
        address = None

        for mode in MODES:
            data = directory / f"modes-{mode.name}"
            shutil.rmtree(data, ignore_errors=True)
            running.callback(shutil.rmtree, data, ignore_errors=True)
            cluster = running.enter_context(
                raymq.start(
                    data,
                    name=f"bench-{mode.name}",
                    flush=mode.flush,
                    transient_pool=mode.pool,
                    address=address,
                )
            )
            address = address or cluster.ray_address
            cluster.create_topic("t", queues=4)
            # Bursts grow the window of pre-written blocks to the need of the measured ones.
            burst(cluster, 40 if quick else 150)
            clusters[mode.name] = cluster

        for number in range(ROUNDS):
            print(f"  round {number + 1} of {ROUNDS}", file=sys.stderr, flush=True)
            limits(directory, rounds, quick=quick)
            for mode in MODES:
                measure(clusters[mode.name], mode, rounds, quick=quick)

    return rounds


def table(rounds: Rounds) -> list[tuple[str, ...]]:
    """A line of heads, then one a mode."""
    rows: list[tuple[str, ...]] = [
        (
            *("mode", "1 KiB x 1,024", "of its limit", "one message p50 (p99)", "of its limit"),
            *("messages per fsync, 1/16 producers", "at risk", "a receipt: the message is"),
        )
    ]

    for mode in MODES:
        name = mode.name
        shares = (f"{rounds.median(f'{name}_msgs_per_fsync_{n}'):,.1f}" for n in PRODUCERS)
        at_risk = f"{rounds.median(f'{name}_at_risk_bytes') / (1 << 20):.1f} MiB"
        if mode.pool and mode.flush == "async":
            at_risk += f" ({rounds.median(f'{name}_in_pool_bytes') / (1 << 20):.1f} in the pool)"

        rows.append(
            (
                f"{mode.flush}, pool {'on' if mode.pool else 'off'}",
                f"{rounds.median(f'{name}_msg_s'):,.0f} msg/s",
                f"{rounds.ratio(f'{name}_msg_s', f'{name}_limit_msg_s'):.2f}",
                f"{rounds.median(f'{name}_p50_ms'):.2f} ({rounds.median(f'{name}_p99_ms'):.2f}) ms",
                f"{rounds.ratio(f'{name}_p50_ms', f'{name}_limit_ms'):.2f} x",
                " / ".join(shares),
                at_risk,
                mode.promise,
            )
        )

    return rows


def main() -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="shorter rounds")
    parser.add_argument("--directory", type=Path, default=Path.home() / ".raymq" / "bench")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    rounds = run(options.directory, quick=options.quick)
    if options.json:
        facts: dict[str, Any] = {"cores": os.cpu_count(), "rounds": rounds.all()}
        options.json.write_text(json.dumps(facts, indent=1))
    rows = table(rounds)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))


if __name__ == "__main__":
    main()
