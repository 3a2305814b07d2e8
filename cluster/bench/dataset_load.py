"""A load test of whole datasets: what `raymq bench spark` and `raymq bench data` write, read back and report."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from raymq.store.base.clock import Clock
from raymq.store.base.errors import Rejected

from .machine import machine, versions

if TYPE_CHECKING:
    from raymq.cluster.cluster import Cluster

SIZE_MIN, SIZE_MAX = 20, 4 << 20
#: fills a value after its number
FILL = "x"
#: keys of a value's row number: key-0 ... key-999
KEYS = 1000

#: queue id -> its next offset
QueueOffsets: TypeAlias = dict[int, int]


@dataclass(frozen=True, kw_only=True)
class DatasetPlan:
    """The rows of a load test. Row n has the key `key-<n % 1000>`, and as value n in decimal, filled up with x."""

    mode: Literal["spark", "data"]
    topic: str = "bench"
    queues: int = 4
    messages: int = 1_000_000
    #: bytes of a value
    size: int = 1024
    #: tasks that write
    tasks: int = 4
    delivery: Literal["direct", "staged"] = "staged"

    def __post_init__(self) -> None:
        if not SIZE_MIN <= self.size <= SIZE_MAX:
            raise Rejected(
                f"size is {self.size}; a value has {SIZE_MIN} to {SIZE_MAX} bytes",
                field="size",
                limit=SIZE_MAX,
                found=self.size,
            )


@dataclass(frozen=True)
class RowCount:
    """The rows that were read back."""

    rows: int
    #: different row numbers among them
    different: int
    #: rows that are not as they were written
    damaged: int


@dataclass(frozen=True)
class DatasetResult:
    """The figures of a load test."""

    plan: DatasetPlan
    cluster: dict[str, Any]
    write_s: float
    read_s: float
    found: RowCount

    @property
    def lost(self) -> int:
        """Rows that were written and did not come back."""
        return self.plan.messages - self.found.different

    @property
    def sound(self) -> bool:
        """Each row came back once, as it was written."""
        found = self.found
        return not (self.lost or found.damaged or found.rows != found.different)


class DatasetEngine:
    """Writes and reads the rows of a plan. Subclasses: one for Spark, one for Ray Data."""

    def write(self, plan: DatasetPlan, write_id: str) -> None:
        """Write all rows to the topic, which exists."""
        raise NotImplementedError

    def read(self, plan: DatasetPlan, begin: QueueOffsets, end: QueueOffsets) -> RowCount:
        """Read what is between the offsets of each queue, and compare each row with what was written."""
        raise NotImplementedError


def run(
    cluster: Cluster, plan: DatasetPlan, engine: DatasetEngine, progress: Callable[[str], None]
) -> DatasetResult:
    """Write, read back, count. Args: `progress`: takes a line for each phase."""
    cluster.create_topic(plan.topic, queues=plan.queues)
    begin = _ends(cluster, plan.topic)

    mb = plan.messages * plan.size / 1e6
    progress(
        f"writing {plan.messages:,} rows ({mb:,.0f} MB), {plan.delivery}, with {plan.tasks} tasks"
    )
    started = time.perf_counter()
    engine.write(plan, f"bench-{secrets.token_hex(8)}")
    written = time.perf_counter()

    progress("reading them back")
    found = engine.read(plan, begin, _ends(cluster, plan.topic))
    ended = time.perf_counter()
    return DatasetResult(plan, cluster.describe(), written - started, ended - written, found)


def _ends(cluster: Cluster, topic: str) -> QueueOffsets:
    queues = cluster.describe_topic(topic)["queues"]
    return {queue["queue_id"]: queue["max_offset"] for queue in queues}


def as_dict(result: DatasetResult, clock: Clock | None = None) -> dict[str, object]:
    """All figures, as JSON takes them."""
    plan, found = result.plan, result.found
    return {
        "finished_at_ms": (clock or Clock()).now_ms(),
        "machine": machine(result.cluster),
        "versions": versions(),
        "cluster": {name: result.cluster[name] for name in ("name", "shards", "replicas", "flush")},
        "mode": plan.mode,
        "plan": dataclasses.asdict(plan),
        "write": _rates(plan, result.write_s),
        "read": _rates(plan, result.read_s),
        "verification": {
            "sound": result.sound,
            "rows": found.rows,
            "lost": result.lost,
            "repeated": found.rows - found.different,
            "damaged": found.damaged,
        },
    }


def _rates(plan: DatasetPlan, seconds: float) -> dict[str, float]:
    return {
        "seconds": seconds,
        "rows_per_s": plan.messages / seconds,
        "mb_per_s": plan.messages * plan.size / 1e6 / seconds,
    }


def lines(report: Mapping[str, Any]) -> list[str]:
    """The summary for a terminal."""
    plan, checked = report["plan"], report["verification"]
    name = {"spark": "Spark", "data": "Ray Data"}[report["mode"]]
    found = [f"{name}: {plan['messages']:,} rows of {plan['size']:,} bytes, {plan['delivery']}"]
    for what in ("write", "read"):
        rates = report[what]
        found.append(
            f"  {what}: {rates['rows_per_s']:,.0f} rows/s, {rates['mb_per_s']:,.1f} MB/s ({rates['seconds']:,.1f} s)"
        )
    found.append(
        f"  read back: {checked['rows']:,} rows, {checked['lost']:,} lost, {checked['repeated']:,} repeated, "
        f"{checked['damaged']:,} damaged"
    )
    return found
