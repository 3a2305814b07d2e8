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
from contextlib import ExitStack
from pathlib import Path

import raymq
from benchmarks import limits
from benchmarks.limits import BLOCK_BYTES, LARGE, RECORD_BYTES, UNLIMITED, await_prewritten, sent
from benchmarks.rounds import Rounds, Row, in_turn, run
from raymq.store.config.promise import Flush

#: batches under way towards the echo, as many as a BatchSender has
ECHO_WINDOW = 32


#: name, flush, pool, the meaning of a receipt
MODES: list[tuple[str, Flush, bool, str]] = [
    ("sync", "sync", False, "on the disk"),
    ("sync-pool", "sync", True, "on the disk (committed, then synced)"),
    ("async", "async", False, "in the page cache; synced within 0.5 s, or 10 s if few"),
    ("async-pool", "async", True, "in shared memory; committed within 0.2 s, synced as async"),
]


def note_burst(cluster: raymq.Cluster, name: str, count: int, rounds: Rounds) -> None:
    """Note the rate of large batches that are acknowledged as the mode promises, and what is at risk right after."""
    rows, _ = LARGE
    await_prewritten(cluster)

    def note_risk() -> None:
        """All bytes are acknowledged, so a power loss would take those that are not synced now."""
        facts = cluster.status()["shards"][0]
        for kind, end in (("at_risk", "synced"), ("in_pool", "committed")):
            rounds.note(f"{name}_{kind}_MiB", (facts["appended"] - facts[end]) / (1 << 20))

    load = {"api": "batches", "batch": rows, "in_flight": UNLIMITED}
    found = sent(cluster, count, ECHO_WINDOW, note_risk, **load)
    rounds.note(f"{name}_msg_s", rows * found.rate)


def measure_mode(cluster: raymq.Cluster, name: str, rounds: Rounds, *, quick: bool) -> None:
    """One round of one mode."""
    note_burst(cluster, name, 40 if quick else 150, rounds)
    await_prewritten(cluster)
    rounds.note_times(name, sent(cluster, 200 if quick else 2000, api="batches").latency)


def note_limits(directory: Path, rounds: Rounds, *, quick: bool) -> None:
    """One round of the limits of the modes: batches in messages a second, one message in milliseconds."""
    count, serial = (40, 200) if quick else (150, 2000)
    echo_ms, _ = limits.flight_echo(1024, serial)
    stream_ms, _ = limits.flight_echo(LARGE[0] * LARGE[1], count, window=ECHO_WINDOW)

    for name, flush, pool, _ in MODES:
        synced = flush == "sync"
        place = Path("/dev/shm") if pool and not synced else directory
        batches = limits.raw_limit(place, BLOCK_BYTES, count, synced=synced)
        single = limits.raw_limit(place, RECORD_BYTES, serial, synced=synced)
        # The slower of the two: the way there, or the target.
        rounds.note(f"{name}_limit_msg_s", min(1000 / stream_ms, batches) * LARGE[0])
        rounds.note(f"{name}_limit_ms", echo_ms + 1000 / single)


def measure(options: argparse.Namespace, rounds: Rounds) -> None:
    """All modes in one Ray. The modes take turns within a round."""
    with ExitStack() as running:
        clusters: dict[str, raymq.Cluster] = {}
        address = None

        for name, flush, pool, _ in MODES:
            modes = {"flush": flush, "transient_pool": pool, "address": address}
            started = limits.started(options.directory, f"modes-{name}", **modes)
            cluster = clusters[name] = running.enter_context(started)
            address = address or cluster.ray_address
            # Bursts grow the window of pre-written blocks to the need of the measured ones.
            note_burst(cluster, name, 40 if options.quick else 150, Rounds())

        for _ in in_turn():
            note_limits(options.directory, rounds, quick=options.quick)
            for name, cluster in clusters.items():
                measure_mode(cluster, name, rounds, quick=options.quick)


ROWS = []
for name, flush, pool, promise in MODES:
    what = f"{flush}, pool {'on' if pool else 'off'}"
    ROWS += [
        Row(f"{what}: 1 KiB x 1,024", f"{name}_msg_s", f"{name}_limit_msg_s", "its limit"),
        Row("  one message, p50 (p99)", f"{name}_p50_ms", f"{name}_limit_ms", "its limit"),
        Row("  at risk", f"{name}_at_risk_MiB", remark=f"a receipt: the message is {promise}"),
    ]
    if pool and flush == "async":
        ROWS.append(Row("  of which in the pool", f"{name}_in_pool_MiB"))

if __name__ == "__main__":
    run(__doc__, measure, ROWS)
