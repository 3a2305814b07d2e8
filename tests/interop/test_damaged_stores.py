"""Damaged stores of both engines, recovered by both: RayMQ serves what RocketMQ serves, and makes no store worse.

States follow from a seed. RAYMQ_DAMAGED_STORES sets their number; `nox -s interop` takes 500. The differences that are
left out here are those of docs/compatibility.md.
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
from raymq.store.put.inner_message import InnerMessage
from raymq.store.state.shard_state import INTERNAL_TOPIC
from tests.support import message_kinds as kinds
from tests.support.confirming import confirm_with_index
from tests.support.golden import unpack_golden
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

#: the bytes that give a queue 4096 more, and a queue offset a jump within a file
QUEUE_ID, QUEUE_OFFSET = 14, 27
#: the body of a new message
GOES_ON = b"goes on"

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
    golden = unpack_golden(place)
    for path in (golden / "consumequeue").rglob("0*"):
        if path.is_file():
            os.truncate(path, CONFIG.consume_queue_file_size_bytes)

    found = {}
    for root in sorted(path for path in place.iterdir() if path.is_dir()):
        sound = serve(copy_to(root, tmp_path_factory.mktemp("read") / "store"))
        found[root.name] = Base(root, root.name.startswith("ours"), sound)
    return found


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


def serve(root: Path, *, goes_on: bool = False) -> Served:
    """What RayMQ serves of a store, which it opens and stops in order. `goes_on`: and of a new message in each queue.

    Raises: Corrupt if it refuses the store.
    """
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
        found = {queue: list(messages_of(store, *queue)) for queue in store.queues()}
        if goes_on:
            for queue in sorted(found):
                if queue[0] != INTERNAL_TOPIC:
                    store.put_inner([InnerMessage(*queue, GOES_ON)])
            confirm_with_index(store)
            for queue in found:
                (last,) = messages_of(store, *queue, first=store.queue_range(*queue)[1] - 1)
                found[queue].append(last)
        return found
    finally:
        store.close()


def messages_of(
    store: MessageStore, topic: str, queue_id: int, *, first: int = 0
) -> Iterator[tuple[int, str | None]]:
    low, high = store.queue_range(topic, queue_id)
    offset = max(low, first)
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


def digests(served: Served) -> set[str | None]:
    """The messages of all queues."""
    return {digest for found in served.values() for _, digest in found}


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
        if not first["ok"]:
            return []
        # RayMQ's own chain covers bytes that RocketMQ compares with nothing. Otherwise RocketMQ has cut the log, too.
        is_damage = state.base.is_own or before < whole(sound, sound)
        if str(ours.rule).startswith("recovery row") and is_damage:
            return []
        return [f"refused: {ours}"]

    wrong = []
    if not state.base.is_own:
        # A chain unit of RayMQ proves that such a message is damaged. In a store of RocketMQ nothing does.
        damaged = digests(theirs) - digests(ours) - {None}
        if damaged:
            wrong.append(f"RocketMQ serves {len(damaged)} damaged messages, RayMQ does not")
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
        new = [queue for queue, found in ours.items() if found[-1] not in after.get(queue, [])]
        if new:
            wrong.append(f"RocketMQ does not serve the new message at RayMQ's offset: {new}")
        if any(more.values()):
            wrong.append(f"RocketMQ serves what is no message afterwards: {more}")
    return wrong


def judge_both(state: State, first: Line, ours: Served | Corrupt) -> list[str]:
    """What is wrong after RocketMQ has recovered the store and crashed, and RayMQ has opened it."""
    if isinstance(ours, Corrupt):
        # RocketMQ has cut bytes of which RayMQ knows that they were synced. Or whole records follow the place of its
        # cut, which it did not erase: after a crash RayMQ does not take them for leftovers.
        cut = str(ours.rule) in ("recovery row A", "recovery row I")
        return [] if cut else [f"refused after RocketMQ: {ours}"]
    lost = whole(of_lines(first), state.base.served) - whole(ours, state.base.served)
    return (
        [f"RayMQ does not serve after RocketMQ: {shown(lost, state.base.served)}"] if lost else []
    )


def serve_or_refuse(root: Path, *, goes_on: bool = False) -> Served | Corrupt:
    try:
        return serve(root, goes_on=goes_on)
    except Corrupt as error:
        return error


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

        both = [copy_to(state.theirs, place / f"{state.theirs.name}-both") for state in states]
        ours = [serve_or_refuse(state.ours, goes_on=True) for state in states]
        opened = [
            s for s, found in zip(states, ours, strict=True) if not isinstance(found, Corrupt)
        ]
        after = [copy_to(s.ours, place / f"{s.ours.name}-after") for s in opened]
        second = {line["dir"]: line for line in engine.serve(after)}

        for state, line, found in zip(states, first, ours, strict=True):
            again = second.get(str(place / f"{state.ours.name}-after"))
            faults = judge(state, line, found, again)
            if line["ok"]:
                faults += judge_both(state, line, serve_or_refuse(both[states.index(state)]))
            for fault in faults:
                wrong.append(f"{state.root.name}, {state.name}: {state.said}: {fault}")
        engine.serve([])
        if not wrong:
            shutil.rmtree(place, ignore_errors=True)
    assert not wrong, "\n".join([f"{len(wrong)} of {COUNT} stores", *wrong[:40]])


@pytest.mark.parametrize("name", ["theirs-crashed", "theirs-closed"])
def test_a_queue_that_is_emptied_with_the_last_log_file_has_no_message_for_rocketmq(
    engine: RocketMQ, bases: dict[str, Base], tmp_path: Path, name: str
) -> None:
    root = copy_to(bases[name].root, tmp_path / "store")
    for path in sorted((root / "commitlog").iterdir(), reverse=True):
        is_spare = not any(path.read_bytes())
        path.unlink()
        if not is_spare:
            break
    ours = serve(root)
    assert ours["Late", 0] == []
    (line,) = engine.serve([root])
    served = of_lines(line)
    assert served.get(("Late", 0), []) == []
    assert not any(errors(served).values())
    assert whole(served, bases[name].served) == whole(ours, bases[name].served)


@pytest.mark.parametrize("name", ["theirs-crashed", "theirs-closed", "golden"])
@pytest.mark.parametrize("field", [QUEUE_ID, QUEUE_OFFSET])
def test_rocketmq_serves_all_messages_after_our_start_although_a_record_names_another_place(
    engine: RocketMQ, bases: dict[str, Base], tmp_path: Path, name: str, field: int
) -> None:
    base = bases[name]
    root = copy_to(base.root, tmp_path / "store")
    # The second record of the second file.
    path = sorted((root / "commitlog").iterdir())[1]
    data = bytearray(path.read_bytes())
    data[int.from_bytes(data[:4], "big") + field] ^= 16
    path.write_bytes(data)
    (before,) = engine.serve([copy_to(root, tmp_path / "before")])
    ours = serve(root)
    (after,) = engine.serve([root])
    count = sum(map(len, base.served.values()))
    assert sum(map(len, ours.values())) == count
    assert count - len(whole(ours, base.served)) == 1
    assert whole(of_lines(after), base.served) == whole(of_lines(before), base.served)
    assert whole(of_lines(after), base.served) == whole(ours, base.served)
    assert not any(errors(of_lines(after)).values())
