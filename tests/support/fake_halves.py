"""The half messages of a shard in memory: one list, and what has become of each."""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import Any

from raymq.store.base.errors import Rejected
from raymq.store.base.format import HALF_TOPIC
from raymq.store.records.properties import encode
from raymq.store.records.record_encode import encode_record

HALF_OPERATIONS = ("prepare_half", "end_half", "halves_to_check")
#: bytes between two records in the log
STEP = 1000


class FakeHalves:
    """Half messages that are asked about at once, and only once."""

    def __init__(self) -> None:
        #: the arguments of `prepare_half`, by offset
        self.prepared: list[dict[str, Any]] = []
        #: offset -> "commit" or "rollback"
        self.ended: dict[int, str] = {}
        self._asked: set[int] = set()

    def call(self, op: str, args: dict[str, Any]) -> dict[str, Any]:
        """One of HALF_OPERATIONS."""
        found: dict[str, Any] = getattr(self, f"_{op}")(**args)
        return found

    def _prepare_half(self, **args: Any) -> dict[str, Any]:
        unique = args["properties"]["UNIQ_KEY"]
        known = [each["properties"]["UNIQ_KEY"] for each in self.prepared]
        is_repeated = unique in known
        if not is_repeated:
            self.prepared.append(args)
        offset = known.index(unique) if is_repeated else len(known)
        return {
            "offset": offset,
            "physical_offset": offset * STEP,
            "transaction_id": unique,
            "topic": args["topic"],
            "queue_id": args["queue_id"],
            "is_repeated": is_repeated,
        }

    def _end_half(
        self, offset: int, group: str, decision: str, physical_offset: int
    ) -> dict[str, Any]:
        if offset >= len(self.prepared) or physical_offset != offset * STEP:
            raise Rejected(f"half message {offset} does not exist", field="transaction")
        is_repeated = offset in self.ended
        if self.ended.setdefault(offset, decision) != decision:
            raise Rejected("the other decision counts", found=self.ended[offset])
        return {"outcome": decision, "is_repeated": is_repeated, "topic": "", "queue_id": -1}

    def _halves_to_check(self, groups: list[str], max_records: int) -> dict[str, Any]:
        due = [
            offset
            for offset, each in enumerate(self.prepared)
            if each["group"] in groups and offset not in self._asked | self.ended.keys()
        ][:max_records]
        self._asked.update(due)
        halves = [
            {"offset": each, "checks": 1, "record": b64encode(self._record(each)).decode()}
            for each in due
        ]
        return {"halves": halves, "next_ms": None}

    def _record(self, offset: int) -> bytes:
        half = self.prepared[offset]
        own = {
            "PGROUP": half["group"],
            "REAL_TOPIC": half["topic"],
            "REAL_QID": str(half["queue_id"]),
        }
        return encode_record(
            topic=HALF_TOPIC,
            queue_id=0,
            body=b64decode(half["body"]),
            properties=encode({**half["properties"], **own}),
            queue_offset=offset,
            physical_offset=offset * STEP,
            born_time_ms=half["born_time_ms"],
            store_time_ms=half["born_time_ms"],
            born_host=("127.0.0.1", 1),
            store_host=("127.0.0.1", 1),
        )
