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
import sys
import time
from argparse import SUPPRESS
from pathlib import Path
from typing import Any

from benchmarks.floors import at_most
from benchmarks.limits import cleared, output_of
from benchmarks.rounds import Rounds, Row, in_turn, run
from raymq.store.config.store_config import StoreConfig
from raymq.store.engine.message_store import MessageStore
from tests.support.batches import request
from tests.support.confirming import confirm

MESSAGES = 10
QUEUES_FEW = 10
#: queues of one topic
TOPIC_QUEUES = 100
DESCRIPTORS = 1024
ROUNDS = 5


def queues_of(count: int) -> list[tuple[str, int]]:
    """Names of so many queues."""
    return [(f"topic{at // TOPIC_QUEUES}", at % TOPIC_QUEUES) for at in range(count)]


def write(root: Path, queues: int, puts: int) -> None:
    """Put to each queue in turn, as in a process that dies then."""
    store = MessageStore.open(root, config=StoreConfig())
    names = queues_of(queues)
    for topic in sorted({topic for topic, _ in names}):
        store.topics.create(topic, sum(each == topic for each, _ in names), [0])

    for at in range(puts):
        topic, queue = names[at % queues]
        store.put(request([b"x" * 100] * MESSAGES, topic=topic, queue=queue))
    confirm(store)
    store.sync_queues()


def start(root: Path) -> dict[str, Any]:
    """Open the store of a process that died."""
    begin = time.perf_counter()
    store = MessageStore.open(root, config=StoreConfig())
    return {"open_s": time.perf_counter() - begin, "crashed": store.log.crashed}


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
    return {"descriptors": len(os.listdir("/proc/self/fd"))}


def in_process(*words: object) -> dict[str, Any]:
    """A step above in a process of its own, which dies after it."""
    command = [sys.executable, "-m", "benchmarks.queues", "--step", *map(str, words)]
    found: dict[str, Any] = json.loads(output_of(command))
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
    words = ["du", "--block-size=1", "--summarize", "--exclude=commitlog", str(root)]
    return int(output_of(words).split()[0])


def measure(options: argparse.Namespace, rounds: Rounds) -> None:
    """Both stores."""
    if options.step:
        step(options.step)

    directory, queues = cleared(options.directory / "queues"), options.queues
    try:
        for name, count in (("many", queues), ("few", QUEUES_FEW)):
            in_process("write", directory / name, count, queues)
        rounds.note("many_disk_MB", disk_bytes(directory / "many") / 1e6)
        for _ in in_turn(ROUNDS, "start"):
            for name in ("many", "few"):
                rounds.note(f"{name}_open_s", in_process("start", directory / name)["open_s"])
        found = in_process("use", directory / "many", queues, MESSAGES)
        rounds.note("many_descriptors", found["descriptors"])
    finally:
        cleared(directory)


ROWS = [
    Row("many queues: descriptors", "many_descriptors"),
    Row("many queues: disk", "many_disk_MB", floor=at_most(1000)),
    Row("few queues: start", "few_open_s"),
    Row("many queues: start", "many_open_s", "few_open_s", "few", at_most(3)),
]

if __name__ == "__main__":
    more: dict[str, dict[str, Any]] = {"--queues": {"type": int, "default": 10_000}}
    run(__doc__, measure, ROWS, options={**more, "--step": {"nargs": "+", "help": SUPPRESS}})
