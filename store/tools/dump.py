"""Every message of a store as a dict with the names of RocketMQ's fields."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from raymq.store.base import format as fmt
from raymq.store.base.files import Files
from raymq.store.records import rows
from raymq.store.records.properties import decode as decode_properties

from .read_only import ReadOnlyStore


def dump(root: Path, files: Files | None = None) -> Iterator[dict[str, Any]]:
    """One dict per message, by topic and queue in queue order, one after each queue, and a last one of kind `end`."""
    with closing(ReadOnlyStore(root, files)) as store:
        store.scan()
        count = 0
        for item in _messages(store):
            count += item["kind"] == "msg"
            yield item

        faults = store.faults.all()
        yield {
            "kind": "end",
            "messages": count,
            "errors": len(faults),
            "maxPhy": store.end,
            "faults": [fault.as_dict() for fault in faults],
            "verdict": None if store.verdict is None else store.verdict.as_dict(),
        }


def _messages(store: ReadOnlyStore) -> Iterator[dict[str, object]]:
    """Every message, with its consume queue unit if it has one."""
    units: dict[tuple[str, int], Any] = {}
    for topic, queue_id, queue in store.queues():
        low, high = queue.min_offset, queue.max_offset
        units[topic, queue_id] = (low, queue.read(low, high - low).copy())
        queue.close()

    parts: dict[tuple[str, int], list[rows.RowRun]] = {}
    for part in store.slices():
        # The slices follow each other without a gap.
        for run in rows.runs(part.read().data, int(part.positions[0]), part.positions, part.sizes):
            parts.setdefault((run.topic, run.queue_id), []).append(run)

    for (topic, queue_id), runs in sorted(parts.items()):
        low, found = units.get((topic, queue_id), (0, None))
        count = 0
        for run in runs:
            for index, row in enumerate(run.batch.to_pylist()):
                at = run.first_offset + index - low
                unit = found[at] if found is not None and 0 <= at < len(found) else None
                yield _message(row, int(run.positions[index]), int(run.sizes[index]), unit)
                count += 1

        yield {
            "kind": "queue",
            "topic": topic,
            "queueId": queue_id,
            "min": runs[0].first_offset,
            "max": runs[-1].first_offset + len(runs[-1].positions),
            "read": count,
        }


def _message(row: dict[str, Any], position: int, size: int, unit: Any) -> dict[str, object]:
    properties = decode_properties(row["properties"])
    host, _, port = row["store_host"].rpartition(":")
    body: bytes = row["body"]

    return {
        "kind": "msg",
        "ok": True,
        "topic": row["topic"],
        "queueId": row["queue_id"],
        "queueOffset": row["queue_offset"],
        "phy": position,
        "size": size,
        "cqPos": None if unit is None else int(unit["position"]),
        "cqSize": None if unit is None else int(unit["size"]),
        "cqTags": None if unit is None else int(unit["tags_code"]),
        "batchNum": 1,
        "sysFlag": row["sys_flag"],
        "flag": row["flag"],
        "bodyCRC": row["body_crc"],
        "born": row["born_time_ms"],
        "bornHost": "/" + row["born_host"],
        "stored": row["store_time_ms"],
        "storeHost": "/" + row["store_host"],
        "reconsume": row["reconsume_times"],
        "prepared": row["prepared_transaction_offset"],
        "msgId": fmt.offset_message_id(host.strip("[]"), int(port), position),
        "tags": properties.get("TAGS"),
        "keys": properties.get("KEYS"),
        "bodyLen": len(body),
        "bodySha256": hashlib.sha256(body).hexdigest(),
        "body64": base64.b64encode(body).decode(),
        "props": dict(sorted(properties.items())),
    }
