"""What do many queues cost? `python -m benchmarks.queues [--queues N] [--check] [--json FILE]`

Two stores get the same puts of ten messages: one has N queues with ten messages each, the other ten queues with N each.
Processes of at most 1,024 descriptors write them, die without closing them, open them again, read every queue and put
to each. The stores are opened by turns, and medians count.

`--check` ends with exit code 1 when a floor is missed. Everything but the commit log takes at most 1 GB of disk. The
first store opens in at most three times the time of the second.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import floors
from benchmarks.floors import Line, at_most
from raymq.store.config.store_config import StoreConfig
from raymq.store.engine.message_store import MessageStore
from tests.support.batches import request
from tests.support.confirming import confirm

MESSAGES = 10
QUEUES_FEW = 10
#: queues of one topic
TOPIC_QUEUES = 100
DESCRIPTORS = 1024
DISK_BYTES_MAX = 1_000_000_000
RATIO_MAX = 3.0
ROUNDS = 5
Queue = tuple[str, int]


def queues_of(count: int) -> list[Queue]:
    """Names of so many queues."""
    return [(f"topic{at // TOPIC_QUEUES}", at % TOPIC_QUEUES) for at in range(count)]


def descriptors() -> int:
    """Descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def write(root: Path, queues: int, puts: int) -> dict[str, Any]:
    """Put to each queue in turn, as in a process that dies then."""
    store = MessageStore.open(root, config=StoreConfig())
    names = queues_of(queues)
    for topic in sorted({topic for topic, _ in names}):
        store.topics.create(topic, sum(each == topic for each, _ in names), [0])

    begin = time.perf_counter()
    for at in range(puts):
        topic, queue = names[at % queues]
        store.put(request([b"x" * 100] * MESSAGES, topic=topic, queue=queue))
    put_s = time.perf_counter() - begin

    begin = time.perf_counter()
    confirm(store)
    dispatch_s = time.perf_counter() - begin

    begin = time.perf_counter()
    store.sync_queues()

    return {
        "put_us": put_s / puts * 1e6,
        "dispatch_us": dispatch_s / puts * 1e6,
        "sync_s": time.perf_counter() - begin,
        "descriptors": descriptors(),
    }


def start(root: Path) -> dict[str, Any]:
    """Open the store of a process that died."""
    begin = time.perf_counter()
    store = MessageStore.open(root, config=StoreConfig())
    seconds = time.perf_counter() - begin
    return {"open_s": seconds, "crashed": store.log.crashed, "descriptors": descriptors()}


def use(root: Path, queues: int, messages: int) -> dict[str, Any]:
    """Read every queue to its end and put to each. Raises: ValueError when a message is missing."""
    store = MessageStore.open(root, config=StoreConfig())
    for topic, queue in queues_of(queues):
        low, high = store.queue_range(topic, queue)
        found = low
        while found < high:
            part = store.fetch(topic, queue, found, max_bytes=1 << 20, max_records=10_000)
            found = part.next_offset
        if (low, found) != (0, messages):
            raise ValueError(f"queue {queue} of {topic} has [{low}, {found}), not {messages}")
        store.put(request([b"y"], topic=topic, queue=queue))
    confirm(store)
    return {"descriptors": descriptors()}


def in_process(*words: object) -> dict[str, Any]:
    """A step above in a process of its own, which dies after it."""
    command = [sys.executable, "-m", "benchmarks.queues", "--step", *map(str, words)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def step(words: list[str]) -> None:
    """The answer that `in_process` asked for."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, hard))
    name, root, *numbers = words
    work = {"write": write, "start": start, "use": use}[name]
    print(json.dumps(work(Path(root), *map(int, numbers))), flush=True)
    # As a kill: nothing is closed.
    os._exit(0)


def disk_bytes(root: Path) -> int:
    """The size of a store's files without its commit log."""
    done = subprocess.run(
        ["du", "--block-size=1", "--summarize", "--exclude=commitlog", str(root)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return int(done.stdout.split()[0])


def measure(directory: Path, queues: int) -> dict[str, Any]:
    """Both stores."""
    many, few = directory / "many", directory / "few"
    facts: dict[str, Any] = {"queues": queues, "messages": queues * MESSAGES}
    facts["many"] = in_process("write", many, queues, queues)
    facts["few"] = in_process("write", few, QUEUES_FEW, queues)
    facts["disk_bytes"] = disk_bytes(many)
    starts: dict[Path, list[float]] = {many: [], few: []}
    for _ in range(ROUNDS):
        for root, seconds in starts.items():
            seconds.append(in_process("start", root)["open_s"])
    facts["many"]["open_s"] = statistics.median(starts[many])
    facts["few"]["open_s"] = statistics.median(starts[few])
    facts["ratio"] = facts["many"]["open_s"] / facts["few"]["open_s"]
    facts["many"] |= in_process("use", many, queues, MESSAGES)
    return facts


def table(facts: dict[str, Any]) -> list[Line]:
    """The figures of both stores, and the floors."""
    lines = []
    for name in ("many", "few"):
        found = facts[name]
        for what, figure in (
            ("a put", f"{found['put_us']:.0f} us"),
            ("to dispatch one", f"{found['dispatch_us']:.0f} us"),
            ("to sync all", f"{found['sync_s']:.2f} s"),
            ("descriptors", f"{found['descriptors']}"),
        ):
            lines.append(Line(f"{name} queues: {what}", figure))

    disk_mb, ratio = facts["disk_bytes"] / 1e6, facts["ratio"]
    floor = at_most(DISK_BYTES_MAX / 1e6)
    lines.append(Line("many queues: disk", f"{disk_mb:.0f} MB", "", floor, disk_mb))
    start_s, few_s = facts["many"]["open_s"], facts["few"]["open_s"]
    beside = f"{ratio:.2f} x the {few_s:.3f} s of few"
    lines.append(Line("many queues: start", f"{start_s:.3f} s", beside, at_most(RATIO_MAX), ratio))
    return lines


def main() -> int:
    """The command line. Returns: the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--queues", type=int, default=10_000)
    parser.add_argument("--json", type=Path, help="write the figures into this file, too")
    parser.add_argument("--dir", type=Path, default=Path("bench-queues"), help="made and removed")
    parser.add_argument("--step", nargs="+", help=argparse.SUPPRESS)
    floors.options(parser)
    options = parser.parse_args()

    if options.step:
        step(options.step)

    shutil.rmtree(options.dir, ignore_errors=True)
    try:
        facts = measure(options.dir.absolute(), options.queues)
    finally:
        shutil.rmtree(options.dir, ignore_errors=True)

    if options.json:
        options.json.write_text(json.dumps(facts, indent=2) + "\n")

    return floors.report(table(facts), check=options.check)


if __name__ == "__main__":
    sys.exit(main())
