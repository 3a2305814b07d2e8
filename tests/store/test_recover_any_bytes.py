"""A store's directory may hold any bytes. Opening it ends with a store that works, or with Corrupt."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from raymq.store.base.errors import Corrupt
from raymq.store.engine.message_store import MessageStore
from raymq.store.records import record
from raymq.store.records.properties import encode
from raymq.store.state.shard_state import (
    EPOCH,
    INTERNAL_TOPIC,
    OFFSETS,
    PRODUCER,
    PROGRESS,
    SNAPSHOT,
    TOPIC,
)
from raymq.store.tools.inspect import check
from tests.support.batches import request
from tests.support.confirming import confirm
from tests.support.crash_states import disk_of
from tests.support.crash_traces import CONFIG, ROOT, open_store
from tests.support.simulated_disk import SimulatedDisk


class Tree(dict[str, bytes]):
    """Path -> content."""

    def __repr__(self) -> str:
        return f"{len(self)} files"


LOG = "/s/commitlog/00000000000000000000"
KINDS = (TOPIC, OFFSETS, PRODUCER, PROGRESS, EPOCH, SNAPSHOT, "NEW", "")


@functools.lru_cache
def trees() -> tuple[Tree, ...]:
    """Files of a store of two segments: closed, killed, without `raymq/`, and with one segment only."""
    disk = SimulatedDisk(record=False)
    store = open_store(disk)
    store.topics.create("t", 2, [0])
    made = []
    for turn in range(9):
        store.put(request([b"%d" % turn * 400] * 2, queue=turn % 2, tag="x"))
        if turn % 4 == 3:
            confirm(store)
            store.sync_queues()
            made.append(Tree(disk.tree()))
    store.put(request([b"tail" * 300]))
    made.append(Tree(disk.tree()))
    store.close()
    made.append(Tree(disk.tree()))
    made.append(Tree({path: data for path, data in made[-1].items() if "/raymq/" not in path}))
    return tuple(made)


def write(data: bytes, at: int, what: bytes) -> bytes:
    """`what` over the bytes from `at` on; the length stays."""
    at %= max(1, len(data))
    return (data[:at] + what + data[at + len(what) :])[: len(data)]


NUMBERS = st.one_of(
    st.sampled_from([-1, 0, 1, 1 << 31, (1 << 31) - 1, (1 << 63) - 1, -(1 << 63)]),
    st.integers(0, 40_000),
).map(lambda value: value.to_bytes(8, "big", signed=True))
#: what is written over a place: bytes, a stretch of zeros or ones, a number in either byte order
SPLASH = st.one_of(
    st.binary(min_size=1, max_size=64),
    st.builds(
        lambda byte, count: bytes([byte]) * count, st.sampled_from([0, 255]), st.integers(1, 3000)
    ),
    NUMBERS,
    NUMBERS.map(lambda value: value[::-1]),
    st.sampled_from(record.MAGICS),
)


@st.composite
def damaged_trees(draw: st.DrawFn) -> Tree:
    """A store's files, some of them changed, cut, lengthened, exchanged, lost or added."""
    tree = Tree(draw(st.sampled_from(trees())))
    paths = sorted(tree)
    for _ in range(draw(st.integers(1, 4))):
        path = draw(st.sampled_from(paths))
        data = tree.get(path, b"")
        what = draw(
            st.sampled_from(
                ["splash", "splash", "splash", "cut", "lengthen", "lose", "exchange", "add"]
            )
        )
        if what == "splash":
            tree[path] = write(data, draw(st.integers(0, 1 << 16)), draw(SPLASH))
        elif what == "cut":
            tree[path] = data[: draw(st.integers(0, len(data)))]
        elif what == "lengthen":
            tree[path] = data + draw(SPLASH)
        elif what == "lose":
            tree.pop(path, None)
        elif what == "exchange":
            tree[path] = tree.get(draw(st.sampled_from(paths)), b"")
        else:
            name = draw(st.sampled_from(["x", "0", "-1", "00000000000000032768", "9" * 20, "²"]))
            tree[path.rpartition("/")[0] + "/" + name] = draw(SPLASH)
    return tree


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 1 << 70) | st.text(max_size=3) | st.floats(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=5,
)


@st.composite
def state_records(draw: st.DrawFn) -> Tree:
    """A store with whole records of the internal topic that have arbitrary bodies."""
    tree = Tree(draw(st.sampled_from(trees())))
    data = bytearray(tree[LOG])
    walk = record.walk(data, 0)
    at = draw(st.sampled_from([*walk.positions.tolist(), walk.end]))
    for _ in range(draw(st.integers(1, 3))):
        body = draw(st.binary(max_size=30) | JSON.map(to_json) | state_bodies())
        tag = draw(st.sampled_from(KINDS))
        made = record.encode_record(
            topic=INTERNAL_TOPIC,
            body=body,
            properties=encode({"TAGS": tag}) if tag else b"",
            queue_offset=draw(st.sampled_from([0, 1, 7, 1 << 60, -1])),
            physical_offset=at,
            store_time_ms=draw(st.sampled_from([0, -1, (1 << 63) - 1])),
        )
        if at + len(made) + 8 > CONFIG.segment_size_bytes:
            break
        data[at : at + len(made)] = made
        at += len(made)
    tree[LOG] = bytes(data)
    if draw(st.booleans()):
        # Else the chain says that these bytes are others.
        tree = Tree({path: kept for path, kept in tree.items() if "/raymq/" not in path})
    return tree


def to_json(value: object) -> bytes:
    return json.dumps(value).encode()


@st.composite
def state_bodies(draw: st.DrawFn) -> bytes:
    """Nearly right: the names are those of state records, the values anything."""
    names = ("name", "queues", "shards", "group", "topic", "offsets", "producer", "epoch")
    more = ("service", "set", "end", "part", "parts", "rows")
    keys = st.sampled_from([*names, *more])
    value = draw(
        st.dictionaries(keys, JSON | st.sampled_from(["t", [0], 0, 1, {"0": 1}]), max_size=6)
    )
    if draw(st.booleans()):
        value |= {"part": 0, "parts": 1}
        rows = st.dictionaries(
            st.sampled_from("tnqosgperv"), JSON | st.sampled_from(["t", "topic", "seq"])
        )
        value["rows"] = draw(st.lists(rows, max_size=3))
    return to_json(value)


def open_and_use(tree: Mapping[str, bytes], boot: int) -> None:
    """Open it as a start would, and use all of it. Raises: what is wrong with the engine."""
    if any(path.startswith("/s/commitlog/") for path in tree):
        check(ROOT, disk_of(tree, boot=boot))
    try:
        store = open_store(disk_of(tree, boot=boot))
    except Corrupt as refusal:
        reported = refusal
    else:
        use(store)
        return
    assert reported.rule
    assert reported.message


def use(store: MessageStore) -> None:
    """Sync, dispatch, read everything, put. Damage that only a read finds is called so then."""
    try:
        store.log.sync()
        store.log.note_confirmed(store.log.end)
        while store.dispatched < store.log.confirmed:
            before = store.dispatched
            facts = f"dispatch stands at {before}: {store.log.recovered}"
            assert store.dispatch(store.log.confirmed) > before, facts
        for topic, queue in store.queues():
            low, high = store.queue_range(topic, queue)
            while low < high:
                part = store.fetch(topic, queue, low, max_bytes=1 << 20, max_records=100)
                if part.next_offset == low:
                    # The queue has lost its last units, as its first use has shown, and gets them again.
                    assert store.queue_range(topic, queue)[1] == low
                    while store.reput.units_behind:
                        store.dispatch(store.log.confirmed)
                    high = store.queue_range(topic, queue)[1]
                low = part.next_offset
        if "t" in store.state.topics:
            store.put(request([b"next"]))
        store.close()
    except Corrupt:
        store.abandon()


@given(damaged_trees(), st.integers(0, 1))
def test_a_damaged_directory_opens_or_is_called_corrupt(tree: Tree, boot: int) -> None:
    open_and_use(tree, boot)


@given(state_records(), st.integers(0, 1))
def test_state_records_that_say_anything_do_no_harm(tree: Tree, boot: int) -> None:
    open_and_use(tree, boot)
