"""The options of workers: their types, their defaults and their checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

from typing_extensions import Required

from raymq.client.arguments import check_choice, check_number
from raymq.client.consume.selector import selector_of
from raymq.store.base.errors import Rejected
from raymq.store.base.format import check_group_name
from raymq.store.groups.leases.options import (
    ATTEMPTS_MAX,
    BACKOFF_MAX,
    DEAD_RATE_MAX,
    DELAY_MS_MAX,
    IN_FLIGHT_MAX,
    LEASE_MS,
    MAX_LEASE_MS_MAX,
    LeaseOptions,
)

#: which messages of a topic wait for earlier ones
LeaseOrder = Literal["key", "queue"] | None
#: where a group begins with a queue of which it has settled nothing
GroupStart = Literal["earliest", "latest"]
PREFETCH_MAX = 1_000


class WorkersOptions(TypedDict, total=False):
    """The keyword arguments that workers take. `WorkersConfig` has their defaults."""

    group: Required[str]
    lease_s: float
    max_lease_s: float
    prefetch: int
    max_in_flight: int
    max_attempts: int | None
    backoff: Sequence[float]
    order: LeaseOrder
    tags: str | None
    sql: str | None
    dlq: bool
    dlq_rate: int | None
    start: GroupStart
    auto_extend: bool
    unavailable_timeout_ms: int


@dataclass(frozen=True, kw_only=True)
class WorkersConfig:
    """The options of `Workers`, where they are described."""

    group: str
    lease_s: float = 60.0
    max_lease_s: float = 43_200.0
    prefetch: int = 1
    max_in_flight: int = 10_000
    max_attempts: int | None = 16
    backoff: Sequence[float] = (1, 2, 5, 10, 30, 60)
    order: LeaseOrder = None
    tags: str | None = None
    sql: str | None = None
    dlq: bool = True
    dlq_rate: int | None = 1_000
    start: GroupStart = "earliest"
    auto_extend: bool = True
    unavailable_timeout_ms: int = 30_000

    def check_values(self) -> None:
        """Raises: Rejected naming the option and its limit."""
        check_group_name(self.group)
        least_s, most_s = LEASE_MS[0] / 1000, LEASE_MS[1] / 1000
        check_number("lease_s", self.lease_s, least_s, most_s, whole=False)
        longest_s = MAX_LEASE_MS_MAX / 1000
        check_number("max_lease_s", self.max_lease_s, self.lease_s, longest_s, whole=False)
        check_number("prefetch", self.prefetch, 0, PREFETCH_MAX)
        check_number("max_in_flight", self.max_in_flight, 1, IN_FLIGHT_MAX)
        if self.max_attempts is not None:
            check_number("max_attempts", self.max_attempts, 1, ATTEMPTS_MAX)
        if self.dlq_rate is not None:
            check_number("dlq_rate", self.dlq_rate, 1, DEAD_RATE_MAX)
        self._check_backoff()
        if self.order is not None:
            check_choice("order", self.order, ("key", "queue"))
        check_choice("start", self.start, ("earliest", "latest"))
        check_number("unavailable_timeout_ms", self.unavailable_timeout_ms, 0, whole=False)
        selector_of(self.tags, self.sql)

    def _check_backoff(self) -> None:
        delays = self.backoff
        if not isinstance(delays, Sequence) or not 1 <= len(delays) <= BACKOFF_MAX:
            raise Rejected(
                f"backoff is {delays!r}; give a sequence of 1 to {BACKOFF_MAX} delays in seconds",
                field="backoff",
                limit=BACKOFF_MAX,
            )
        for delay_s in delays:
            check_number("backoff", delay_s, 0, DELAY_MS_MAX / 1000, whole=False)

    def lease_options(self) -> LeaseOptions:
        """What all workers of the group have in common, as the shards take it."""
        return LeaseOptions(
            lease_ms=ms_of(self.lease_s),
            max_lease_ms=ms_of(self.max_lease_s),
            max_in_flight=int(self.max_in_flight),
            max_attempts=None if self.max_attempts is None else int(self.max_attempts),
            backoff_ms=tuple(ms_of(each) for each in self.backoff),
            order=self.order or "",
            has_dead_letters=bool(self.dlq),
            dead_rate=None if self.dlq_rate is None else int(self.dlq_rate),
        )


def ms_of(seconds: float) -> int:
    """Seconds as whole milliseconds."""
    return round(seconds * 1000)
