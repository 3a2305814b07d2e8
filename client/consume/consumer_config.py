"""The options of a consumer: their types, their defaults and their checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, TypedDict

from raymq.client.arguments import check_choice, check_number
from raymq.client.hooks import check_hooks
from raymq.store.base.errors import Rejected

from .selector import selector_of

Start = str | int | datetime | Mapping[Any, int] | None
#: called with the queues, as (topic, queue id), ascending
QueuesCallback = Callable[[list[tuple[str, int]]], object]
#: which replica of a shard a reader asks: only the leader, or the nearest one that answers
ReadFrom = Literal["leader", "nearest"]
#: characters of `instance_id`
INSTANCE_CHARS_MAX = 255
READ_FROM = ("leader", "nearest")


class ConsumerOptions(TypedDict, total=False):
    """The keyword arguments that a consumer takes. `ConsumerConfig` has their defaults."""

    group: str | None
    start: Start
    queues: Sequence[int | tuple[str, int]] | None
    fetch_bytes: int
    fetch_records: int
    unavailable_timeout_ms: int
    read_from: ReadFrom
    instance_id: str | None
    session_timeout_s: float
    revoke_timeout_s: float
    max_poll_interval_s: float | None
    on_assigned: QueuesCallback | None
    on_revoked: QueuesCallback | None
    tags: str | None
    sql: str | None
    hooks: Sequence[object]


@dataclass(frozen=True, kw_only=True)
class ConsumerConfig:
    """The options of `Consumer`, where they are described."""

    group: str | None = None
    start: Start = None
    queues: Sequence[int | tuple[str, int]] | None = None
    fetch_bytes: int = 4 << 20
    fetch_records: int = 10_000
    unavailable_timeout_ms: int = 30_000
    read_from: ReadFrom = "leader"
    instance_id: str | None = None
    session_timeout_s: float = 15.0
    revoke_timeout_s: float = 10.0
    max_poll_interval_s: float | None = None
    on_assigned: QueuesCallback | None = None
    on_revoked: QueuesCallback | None = None
    tags: str | None = None
    sql: str | None = None
    hooks: Sequence[object] = ()

    @property
    def is_member(self) -> bool:
        """Whether the consumer shares the topic with the other members of its group."""
        return self.group is not None and self.queues is None

    def check_values(self) -> None:
        """Raises: Rejected naming the option and its limit."""
        check_choice("read_from", self.read_from, READ_FROM)
        check_number("fetch_bytes", self.fetch_bytes, 1)
        check_number("fetch_records", self.fetch_records, 1)
        check_number("unavailable_timeout_ms", self.unavailable_timeout_ms, 0, whole=False)
        check_number("session_timeout_s", self.session_timeout_s, 1, 1_800, whole=False)
        check_number("revoke_timeout_s", self.revoke_timeout_s, 0, 3_600, whole=False)
        if self.max_poll_interval_s is not None:
            check_number("max_poll_interval_s", self.max_poll_interval_s, 2, 86_400, whole=False)
        selector_of(self.tags, self.sql)
        check_hooks(self.hooks)

        if self.instance_id is not None and not 1 <= len(self.instance_id) <= INSTANCE_CHARS_MAX:
            raise Rejected(
                f"instance_id has {len(self.instance_id)} characters; it may have 1 to {INSTANCE_CHARS_MAX}",
                field="instance_id",
                limit=INSTANCE_CHARS_MAX,
            )
        for name in ("instance_id", "max_poll_interval_s", "on_assigned", "on_revoked"):
            if getattr(self, name) is not None and not self.is_member:
                raise Rejected(
                    f"{name} is for members of a group: give group=, and no queues=",
                    field=name,
                    limit="a member of a group",
                )
