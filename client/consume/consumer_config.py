"""The options of a consumer: their types, their defaults and their checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

from raymq.client.arguments import check_choice, check_number

Start = str | int | Mapping[int, int] | None
#: which replica of a shard a reader asks: only the leader, or the nearest one that answers
ReadFrom = Literal["leader", "nearest"]
READ_FROM = ("leader", "nearest")


class ConsumerOptions(TypedDict, total=False):
    """The keyword arguments that a consumer takes. `ConsumerConfig` has their defaults."""

    group: str | None
    start: Start
    queues: Sequence[int] | None
    fetch_bytes: int
    fetch_records: int
    unavailable_timeout_ms: int
    read_from: ReadFrom


@dataclass(frozen=True, kw_only=True)
class ConsumerConfig:
    """The options of `Consumer`, where they are described."""

    group: str | None = None
    start: Start = None
    queues: Sequence[int] | None = None
    fetch_bytes: int = 4 << 20
    fetch_records: int = 10_000
    unavailable_timeout_ms: int = 30_000
    read_from: ReadFrom = "leader"

    def check_values(self) -> None:
        """Raises: Rejected naming the option and its limit."""
        check_choice("read_from", self.read_from, READ_FROM)
        check_number("fetch_bytes", self.fetch_bytes, 1)
        check_number("fetch_records", self.fetch_records, 1)
        check_number("unavailable_timeout_ms", self.unavailable_timeout_ms, 0, whole=False)
