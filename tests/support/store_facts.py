"""The content of a store, as RayMQ reads it, in the lines of the oracle (tests/interop/java/StoreReader.java).

Everything comes through the store's own reading: the walk and decode of records, consume queues, fetch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from raymq.store.base import format as fmt
from raymq.store.base.files import Files
from raymq.store.config.store_config import StoreConfig
from raymq.store.engine.message_store import MessageStore
from raymq.store.index.query import Boundary
from raymq.store.records import record
from raymq.store.records.properties import decode as decode_properties
from tests.support.confirming import confirm_with_index, file_bytes
from tests.support.oracle import copied

Line = dict[str, Any]
#: the names that a line is known by, a kind
NAMES = {
    "record": ("phy",),
    "queue": ("topic", "queueId"),
    "unit": ("topic", "queueId", "offset"),
    "time": ("topic", "queueId", "time"),
    "key": ("topic", "key"),
}


def table(lines: Iterable[Line], *kinds: str) -> dict[tuple[Any, ...], Line]:
    """Lines of these kinds by what they are about. A pair that is there twice is an error."""
    found: dict[tuple[Any, ...], Line] = {}
    for line in lines:
        if line["kind"] in kinds:
            key = (line["kind"], *(line[name] for name in NAMES[line["kind"]]))
            if key in found:
                raise ValueError(f"twice: {key}")
            found[key] = line
    return found


def differences(
    ours: dict[tuple[Any, ...], Line], theirs: dict[tuple[Any, ...], Line]
) -> list[str]:
    """Each difference as a line of text. None when every field of every line is equal."""
    found = []
    for key in sorted(ours.keys() | theirs.keys(), key=repr):
        mine, other = ours.get(key), theirs.get(key)
        if mine is None or other is None:
            found.append(
                f"{key}: only {'RocketMQ' if mine is None else 'we'} have it: {mine or other}"
            )
            continue
        for name in sorted(mine.keys() | other.keys()):
            if mine.get(name) != other.get(name):
                found.append(f"{key} {name}: we {mine.get(name)!r}, RocketMQ {other.get(name)!r}")
    return found


def assert_same(
    ours: Iterable[Line],
    theirs: Iterable[Line],
    *,
    times: bool = True,
    may_lack_keys: bool = False,
    deleted: Collection[str] = (),
) -> None:
    """Check that records, queues, units and keys' hits do not differ, and that both follow from the records alone.

    The same for offsets by time, if store times never decrease: RocketMQ searches by halves. `may_lack_keys`: RocketMQ
    may find fewer records by their keys. After a crash it deletes the index files that are newer than its checkpoint,
    and reads the log again from a file that is three seconds older. `deleted`: topics of which only the records are
    compared. RocketMQ shows what was deleted as long as its files exist.
    """
    mine, other = (
        [each for each in lines if each["kind"] == "record" or each.get("topic") not in deleted]
        for lines in (ours, theirs)
    )
    kinds = ("record", "queue", "unit", *(["time"] if times else []))
    found = differences(table(mine, *kinds), table(other, *kinds))
    if times:
        found += differences(expected_times(mine), table(other, "time"))
    keys, their_keys = table(mine, "key"), table(other, "key")
    expected = {key: line for key, line in expected_keys(mine).items() if key[1] not in deleted}
    found += differences(keys, expected)
    if may_lack_keys:
        assert keys.keys() == their_keys.keys()
        their_keys = {
            key: {**line, "found": keys[key]["found"]}
            for key, line in their_keys.items()
            if set(line["found"]) <= set(keys[key]["found"])
        }
    found += differences(keys, their_keys)
    assert not found, "\n".join([f"{len(found)} differences", *found[:20]])
    assert any(line["kind"] == "unit" for line in mine)


def read_copy(root: Path, config: StoreConfig, *, files: Files | None = None) -> list[Line]:
    """Say everything that we read of a store. It stays as it is."""
    with copied(root, root.parent) as copy:
        store = MessageStore.open(copy, config=config, files=files)
        try:
            confirm_with_index(store)
            read = [*records(store, config.segment_size_bytes), *queues(store)]
            return [*read, *asked(store, expected_times(read)), *asked(store, expected_keys(read))]
        finally:
            store.abandon()


def records(store: MessageStore, segment: int) -> Iterable[Line]:
    """Every record of the log, by physical offset."""
    log = store.log
    for base in range(log.start - log.start % segment, log.end, segment):
        view = file_bytes(log, base)
        stop = min(log.end - base, segment)
        walk = record.walk(view, base, stop=stop)
        rows = record.decode(view, walk.positions - base, walk.sizes).to_pylist()
        for row, at, size in zip(rows, walk.positions.tolist(), walk.sizes.tolist(), strict=True):
            yield line_of(row, at, bytes(view[at - base : at - base + size]))


def line_of(row: dict[str, Any], at: int, raw: bytes) -> Line:
    """One record as the oracle prints it."""
    properties = decode_properties(row["properties"])
    host, _, port = row["store_host"].rpartition(":")

    return {
        "kind": "record",
        "phy": at,
        "field": row["physical_offset"],
        "size": len(raw),
        "magic": int.from_bytes(raw[4:8], "big"),
        "topic": row["topic"],
        "queueId": row["queue_id"],
        "queueOffset": row["queue_offset"],
        "flag": row["flag"],
        "sysFlag": row["sys_flag"],
        "bodyCRC": row["body_crc"],
        "born": row["born_time_ms"],
        "bornHost": row["born_host"],
        "stored": row["store_time_ms"],
        "storeHost": row["store_host"],
        "reconsume": row["reconsume_times"],
        "prepared": row["prepared_transaction_offset"],
        "tags": properties.get("TAGS"),
        "keys": properties.get("KEYS"),
        # RocketMQ makes null of an empty body. Here it is empty bytes, whose length the next line asks for.
        "bodyIsNull": not row["body"],
        "bodyLength": len(row["body"]),
        "properties": properties,
        "msgId": fmt.offset_message_id(host.strip("[]"), int(port), at),
        "sha256": hashlib.sha256(raw).hexdigest(),
    }


def queues(store: MessageStore) -> Iterable[Line]:
    """Every consume queue: its limits, its units, and what fetch gives for each."""
    for topic, queue_id in store.queues():
        low, high = store.queue_range(topic, queue_id)
        yield {"kind": "queue", "topic": topic, "queueId": queue_id, "min": low, "max": high}

        fetched: dict[int, bytes] = {}
        offset = low
        while offset < high:
            part = store.fetch(topic, queue_id, offset, max_bytes=1 << 20, max_records=1000)
            raws = [] if part.records is None else part.records.to_pylist()
            fetched.update(zip(range(offset, part.next_offset), raws, strict=True))
            offset = part.next_offset

        units = store.consume_queues.get(topic, queue_id).read(low, high - low).tolist()
        for offset, (position, size, tags_code) in enumerate(units, low):
            raw = fetched[offset]
            row = record.decode(raw, [0], [len(raw)]).to_pylist()[0]
            host, _, port = row["store_host"].rpartition(":")
            yield {
                "kind": "unit",
                "topic": topic,
                "queueId": queue_id,
                "offset": offset,
                "position": position,
                "size": size,
                "tagsCode": tags_code,
                "queueOffset": row["queue_offset"],
                "msgId": fmt.offset_message_id(host.strip("[]"), int(port), row["physical_offset"]),
                "sha256": hashlib.sha256(raw).hexdigest(),
            }


def asked(store: MessageStore, questions: Iterable[tuple[Any, ...]]) -> Iterable[Line]:
    """The answers of our own queries to these questions, for offsets by time and for keys."""
    for kind, *about in questions:
        line = {"kind": kind, **dict(zip(NAMES[kind], about, strict=True))}
        if kind == "time":
            topic, queue_id, time_ms = about
            line["lower"] = store.query.offset_by_time(topic, queue_id, time_ms, Boundary.LOWER)
            line["upper"] = store.query.offset_by_time(topic, queue_id, time_ms, Boundary.UPPER)
        else:
            found = store.query.by_key(*about).records
            line["found"] = found.column("physical_offset").to_pylist()
        yield line


def expected_times(lines: Iterable[Line]) -> dict[tuple[Any, ...], Line]:
    """The answers to RocketMQ's questions for offsets by time, from the records alone.

    Lower: the first message stored at that time or later, else the end. Upper: the last one stored then or earlier,
    else 0.
    """
    everything = list(lines)
    stored = {line["phy"]: line["stored"] for line in everything if line["kind"] == "record"}
    times: dict[tuple[str, int], list[tuple[int, int]]] = {}

    for line in everything:
        if line["kind"] == "unit":
            queue = times.setdefault((line["topic"], line["queueId"]), [])
            queue.append((line["offset"], stored[line["position"]]))

    found = {}
    for (topic, queue_id), rows in times.items():
        for time in {at + step for _, at in rows for step in (-1, 0, 1)}:
            line = {"kind": "time", "topic": topic, "queueId": queue_id, "time": time}
            line["lower"] = min((o for o, at in rows if at >= time), default=rows[-1][0] + 1)
            line["upper"] = max((o for o, at in rows if at <= time), default=0)
            found["time", topic, queue_id, time] = line
    return found


def expected_keys(lines: Iterable[Line]) -> dict[tuple[Any, ...], Line]:
    """Topic and key -> what a complete index finds, oldest first: each record that carries a key of the same hash."""
    carriers: dict[int, list[int]] = {}
    names: set[tuple[str, str]] = set()

    for line in lines:
        if line["kind"] != "record":
            continue
        words = [line["properties"].get("UNIQ_KEY"), *(line["keys"] or "").split(" ")]
        pairs = {(line["topic"], word) for word in words if word}
        names |= pairs
        if line["sysFlag"] & 0xC != 0xC:  # what was rolled back is not indexed
            for code in {key_hash(*pair) for pair in pairs}:
                carriers.setdefault(code, []).append(line["phy"])

    return {
        ("key", topic, key): {
            "kind": "key",
            "topic": topic,
            "key": key,
            "found": carriers.get(key_hash(topic, key), []),
        }
        for topic, key in names
    }


def key_hash(topic: str, key: str) -> int:
    """The entries of a key in the index."""
    code = abs(fmt.java_hash(f"{topic}#{key}"))
    return 0 if code == 1 << 31 else code
