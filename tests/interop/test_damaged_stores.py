"""Damaged stores of both engines, recovered by both: RayMQ serves what RocketMQ serves, and makes no store worse.

States follow from a seed. RAYMQ_DAMAGED_STORES sets their number; `nox -s interop` takes 500.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from raymq.store.base.errors import Corrupt
from raymq.store.config.store_config import StoreConfig
from raymq.store.engine.message_store import MessageStore
from raymq.store.tools.inspect import check
from tests.support import message_kinds as kinds
from tests.support.confirming import confirm_with_index
from tests.support.oracle import Line, RocketMQ, copy
from tests.support.put_kinds import put_all
from tests.support.random_damage import Damage

COUNT = int(os.environ.get("RAYMQ_DAMAGED_STORES", "40"))
FIRST = int(os.environ.get("RAYMQ_DAMAGED_STORES_FIRST", "0"))
#: stores that RocketMQ has open at a time
AT_ONCE = 20
SEGMENT = 64 * 1024
CONFIG = StoreConfig(
    segment_size_bytes=SEGMENT,
    consume_queue_file_size_bytes=2000,
    max_hash_slot_num=100,
    max_index_num=400,
    flush="async",
)
SIZES = {"segment": SEGMENT, "queue": 2000, "slots": 100, "entries": 400}

Queue = tuple[str, int]
#: what a consumer gets of each queue: offset and hash of each message; None: it is an error, or no message at all
Served = dict[Queue, list[tuple[int, str | None]]]


def messages() -> list[kinds.Kind]:
    """Several files of the log, queues of two files and of a few units, and a queue in the last file alone."""
    found = []
    for number in range(150):
        properties = {"KEYS": f"k{number}", "TAGS": f"Tag{number % 3}"}
        body = b"%04d" % number * (50 + number % 7 * 60)
        found.append(kinds.kind(body, queue=number % 3 and 1, properties=properties))
        if number % 25 == 7:
            found.append(kinds.batch([b"a", b"b", b"c"], queue=3, properties={"KEYS": "batch"}))
            found.append(kinds.kind(b"born six", bornHost=("2001:db8::1", 54321), queue=2))
            found.append(kinds.kind(b"half", sysFlag=kinds.PREPARED, properties={"PGROUP": "g"}))
    found.append(kinds.kind(b"last", topic="Late", properties={"KEYS": "late"}))
    return found


class Base(NamedTuple):
    """A sound store."""

    root: Path
    #: of RayMQ
    is_own: bool
    served: Served


@pytest.fixture(scope="module")
def engine(rocketmq: RocketMQ) -> RocketMQ:
    return rocketmq.resized(**SIZES)


@pytest.fixture(scope="module")
def bases(engine: RocketMQ, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Base]:
    place = tmp_path_factory.mktemp("sound")
    engine.write(place / "theirs-closed", messages())
    engine.write_and_halt(place / "theirs-crashed", messages())
    for name, end in (("closed", MessageStore.close), ("crashed", MessageStore.abandon)):
        put_ours(place / f"ours-{name}", end)
    roots = sorted(path for path in place.iterdir() if path.is_dir())
    return {
        root.name: Base(root, root.name.startswith("ours"), serve(copy_to(root, place / "read")))
        for root in roots
    }


def put_ours(root: Path, end: Callable[[MessageStore], None]) -> None:
    store = MessageStore.open(root, config=CONFIG)
    put_all(store, messages())
    confirm_with_index(store)
    store.sync_queues()
    end(store)


def copy_to(root: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    copy(root, target)
    return target


def serve(root: Path) -> Served:
    """What RayMQ serves of a store, which it opens and stops in order. Raises: Corrupt if it refuses the store."""
    store = MessageStore.open(root, config=CONFIG)
    try:
        confirm_with_index(store)
        for topic, queue_id in store.queues():
            store.fetch(
                topic, queue_id, store.queue_range(topic, queue_id)[0], max_bytes=1, max_records=1
            )
        while store.reput.units_behind:
            # Queues that have lost their last units, as their first read has shown.
            store.dispatch(store.log.confirmed)
        return {queue: list(messages_of(store, *queue)) for queue in store.queues()}
    finally:
        store.close()


def messages_of(store: MessageStore, topic: str, queue_id: int) -> Iterator[tuple[int, str | None]]:
    offset, high = store.queue_range(topic, queue_id)
    while offset < high:
        try:
            part = store.fetch_whole(topic, queue_id, offset, max_bytes=1 << 20, max_records=32)
        except Corrupt:
            yield offset, None
            offset += 1
            continue
        for raw in part.records.to_pylist():
            yield offset, hashlib.sha256(raw).hexdigest()
            offset += 1


def of_lines(line: Line) -> Served:
    """What RocketMQ serves."""
    return {
        (queue["topic"], queue["queueId"]): [
            (offset, digest) for offset, digest in queue["messages"]
        ]
        for queue in line.get("queues", [])
    }


def whole(served: Served, sound: Served) -> set[tuple[Queue, str]]:
    """The sound messages among those that are served, each with its queue."""
    return {
        (queue, digest)
        for queue, found in served.items()
        for _, digest in found
        if digest in {known for _, known in sound.get(queue, [])}
    }


def errors(served: Served) -> dict[Queue, set[int]]:
    """The offsets at which a consumer gets no message."""
    return {
        queue: {at for at, digest in found if digest is None} for queue, found in served.items()
    }


class State(NamedTuple):
    """A damaged store, and copies of it."""

    name: str
    base: Base
    said: str
    root: Path
    theirs: Path
    ours: Path


def made(bases: dict[str, Base], number: int, place: Path) -> State:
    name = sorted(bases)[number % len(bases)]
    base = bases[name]
    root = copy_to(base.root, place / f"{number}")
    said = Damage(root, f"{name} {number}").run()
    theirs, ours = place / f"{number}-theirs", place / f"{number}-ours"
    return State(name, base, said, root, copy_to(root, theirs), copy_to(root, ours))


def judge(state: State, first: Line, ours: Served | Corrupt, second: Line | None) -> list[str]:
    """What is wrong. Args: `first`, `second`: what RocketMQ serves before RayMQ's start and orderly stop, and after."""
    sound, theirs = state.base.served, of_lines(first)
    before = whole(theirs, sound)
    if isinstance(ours, Corrupt):
        if not first["ok"] or before < whole(sound, sound):
            # RocketMQ cuts a log at damage, or does not open the store. RayMQ refuses both.
            return []
        if any(fault.file.startswith("commitlog/") for fault in check(state.root).faults):
            # RayMQ's own chain covers bytes that RocketMQ compares with nothing.
            return [] if state.base.is_own else [f"refused with all messages: {ours}"]
        return [f"refused: {ours}"]

    wrong = []
    lost = before - whole(ours, sound)
    if lost:
        wrong.append(f"RocketMQ serves, RayMQ does not: {shown(lost, sound)}")
    for queue, found in ours.items():
        places = {digest: offset for offset, digest in sound.get(queue, [])}
        moved = [(offset, places[d]) for offset, d in found if d in places and offset != places[d]]
        if moved:
            wrong.append(f"RayMQ serves messages of {queue} at other offsets: {moved[:5]}")

    if first["ok"] and second is not None:
        after = of_lines(second)
        worse = before - whole(after, sound)
        if not second["ok"]:
            wrong.append(f"RocketMQ refuses it afterwards: {second}")
        elif worse:
            wrong.append(f"RocketMQ served before, not afterwards: {shown(worse, sound)}")
        # RayMQ keeps what follows damage. RocketMQ, which had cut there, then gives the damaged message, too.
        more = {q: found - errors(theirs).get(q, set()) for q, found in errors(after).items()}
        more = {q: found - errors(ours).get(q, set()) for q, found in more.items()}
        if any(more.values()):
            wrong.append(f"RocketMQ serves what is no message afterwards: {more}")
    return wrong


def shown(some: set[tuple[Queue, str]], sound: Served) -> str:
    places = {(q, d): o for q, found in sound.items() for o, d in found}
    found = sorted((q, places[q, d]) for q, d in some)
    return f"{len(found)}: {found[:6]}"


def test_no_damaged_store_is_refused_or_made_worse(
    engine: RocketMQ, bases: dict[str, Base], tmp_path: Path
) -> None:
    wrong = []
    for at in range(FIRST, FIRST + COUNT, AT_ONCE):
        place = tmp_path / str(at)
        place.mkdir()
        states = [made(bases, n, place) for n in range(at, min(at + AT_ONCE, FIRST + COUNT))]
        first = engine.serve(state.theirs for state in states)

        ours: list[Served | Corrupt] = []
        for state in states:
            try:
                ours.append(serve(state.ours))
            except Corrupt as error:
                ours.append(error)
        opened = [
            s for s, found in zip(states, ours, strict=True) if not isinstance(found, Corrupt)
        ]
        after = [copy_to(s.ours, place / f"{s.ours.name}-after") for s in opened]
        second = {line["dir"]: line for line in engine.serve(after)}

        for state, line, found in zip(states, first, ours, strict=True):
            again = second.get(str(place / f"{state.ours.name}-after"))
            for fault in judge(state, line, found, again):
                wrong.append(f"{state.root.name}, {state.name}: {state.said}: {fault}")
        engine.serve([])
        if not wrong:
            shutil.rmtree(place, ignore_errors=True)
    assert not wrong, "\n".join([f"{len(wrong)} of {COUNT} stores", *wrong[:40]])
