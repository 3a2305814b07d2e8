"""The jobs, the clock and the figures of a benchmark's workers. Does not import Ray."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from raymq.store.base.clock import Clock

from .check import Ledger, ReadRange, Verdict
from .histogram import Histogram
from .plan import BenchPlan

#: a worker's report before it waits for the others
READY = "ready"


class BenchClock(Clock):
    """The clock of a worker: in microseconds, and able to wait for a condition."""

    def wall_us(self) -> int:
        """Wall clock, microseconds since 1970: as comparable between machines as their clocks are."""
        return time.time_ns() // 1000

    def wait_for(
        self, changed: threading.Condition, ready: Callable[[], bool], timeout_s: float
    ) -> None:
        """Wait until `ready()`, at most `timeout_s`. Needs the condition's lock."""
        changed.wait_for(ready, max(timeout_s, 0.0))

    def to_monotonic(self, wall_s: float) -> float:
        """A point of the wall clock on this process's monotonic one."""
        return self.monotonic() + wall_s - self.wall_us() / 1e6


class Control(Protocol):
    """How a worker learns about the others."""

    def start(self) -> float:
        """Wait for all workers. Returns: when to begin, wall clock in seconds."""

    def ends(self) -> dict[int, int] | None:
        """Queue index -> the offset before which reading ends, or None while senders may continue."""


@dataclass
class Tick:
    """The figures of one tick, of one worker or of all."""

    messages: int = 0
    payload_bytes: int = 0
    #: microseconds
    latency: Histogram = field(default_factory=Histogram)

    def add(self, other: Tick) -> None:
        """Add the figures of another worker, or of another part of the tick."""
        self.messages += other.messages
        self.payload_bytes += other.payload_bytes
        self.latency.merge(other.latency)


@dataclass(frozen=True)
class Snapshot:
    """The work of one tick.

    Ticks before 0 are the warm-up. Those from `plan.ticks` on are after the end. A tick may come in several parts.
    """

    #: "send" (from due to acknowledged), "receive" (from due to read) or "poll" (one fetch)
    channel: str
    number: int
    tick: Tick


@dataclass(frozen=True)
class SendResult:
    """The result of a sending worker."""

    ledger: Ledger
    #: due before the end and never sent
    unsent: int
    #: kind of error -> batches
    errors: dict[str, int]
    first_error: str | None


@dataclass(frozen=True)
class ReceiveResult:
    """The result of a reading worker."""

    #: (worker, queue index) -> rows of this run
    rows: dict[tuple[int, int], int]
    #: the faults known without the ledgers: duplicates, disorder
    verdict: Verdict
    #: from the start to the last row
    seconds: float


@dataclass(frozen=True)
class Job:
    """The work of one worker."""

    plan: BenchPlan
    kind: Literal["produce", "read", "verify"]
    #: produce: the number that its rows carry
    worker: int = 0
    #: produce: the number of rows to send, however long it takes; None: for the plan's time
    rows: int | None = None
    #: read and verify: the ranges to read
    ranges: tuple[ReadRange, ...] = ()
    #: read: wait for more until the control has the ends
    live: bool = False
    #: verify: the acknowledged rows
    ledgers: tuple[Ledger, ...] = ()


class Meter:
    """Counts messages by the tick in which they were sent or read. Threads: needs the owner's lock."""

    def __init__(self, channel: str, plan: BenchPlan, start: float) -> None:
        self._channel = channel
        self._zero = start + plan.warmup_s
        self._tick_s = plan.tick_s
        self._ticks: dict[int, Tick] = {}

    def at(self, now: float) -> Tick:
        """The tick of a time, monotonic seconds."""
        return self._ticks.setdefault(self.number(now), Tick())

    def number(self, now: float) -> int:
        """The number of a time's tick."""
        return int((now - self._zero) // self._tick_s)

    def end_of(self, now: float) -> float:
        """When the tick of a time ends."""
        return self._zero + (self.number(now) + 1) * self._tick_s

    def take(self, before: int | None) -> list[Snapshot]:
        """The ticks below `before` (None: all), removed."""
        numbers = sorted(n for n in self._ticks if before is None or n < before)
        found = []
        for number in numbers:
            found.append(Snapshot(self._channel, number, self._ticks.pop(number)))
        return found
