"""The figures of all workers of a round, merged: by tick, and as a whole."""

from __future__ import annotations

from .histogram import Histogram
from .job import Snapshot, Tick
from .plan import BenchPlan


class Series:
    """One channel of a round.

    Throughput counts the measured ticks. Latencies count all messages
    from the end of the warm-up on, including those after the end: without them the slowest ones would be missing.
    """

    def __init__(self, plan: BenchPlan) -> None:
        self._plan = plan
        self.points: dict[int, Tick] = {}
        #: of a run without a fixed end (mode consume): its seconds
        self.seconds: float | None = None

    def add(self, snapshot: Snapshot) -> None:
        """A worker's tick, or a part of it."""
        self.points.setdefault(snapshot.number, Tick()).add(snapshot.tick)

    @property
    def window_s(self) -> float:
        """Seconds that throughput is measured over."""
        return self._plan.duration_s if self.seconds is None else max(self.seconds, 1e-9)

    def width_s(self, tick: int) -> float:
        """How long a tick was: the first of the warm-up and the last without a fixed end are cut."""
        width = self._plan.tick_s
        begin = max(tick * width, -self._plan.warmup_s)
        end = (tick + 1) * width
        if self.seconds is not None:
            end = min(end, self.seconds)
        return max(end - begin, 1e-9)

    def _measured(self) -> list[Tick]:
        return [
            point
            for tick, point in self.points.items()
            if tick >= 0 and (tick < self._plan.ticks or self.seconds is not None)
        ]

    def messages(self) -> int:
        """Messages done within the measured time."""
        return sum(point.messages for point in self._measured())

    def messages_per_s(self) -> float:
        """Their rate."""
        return self.messages() / self.window_s

    def payload_bytes(self) -> int:
        """Bytes of their bodies."""
        return sum(point.payload_bytes for point in self._measured())

    @property
    def latency(self) -> Histogram:
        """All latencies but the warm-up's, microseconds."""
        whole = Histogram()
        for tick, point in self.points.items():
            if tick >= 0:
                whole.merge(point.latency)
        return whole

    def as_dict(self) -> dict[str, object]:
        """Everything, as plain data."""
        latency = self.latency
        return {
            "throughput": {
                "messages": self.messages(),
                "payload_bytes": self.payload_bytes(),
                "window_s": round(self.window_s, 3),
                "messages_per_s": round(self.messages_per_s(), 1),
                "mb_per_s": round(self.payload_bytes() / self.window_s / 1e6, 3),
            },
            "latency": latency.summary_ms(),
            "percentiles": [[percent, value / 1000] for percent, value in latency.curve()],
            "ticks": [self._tick(tick) for tick in sorted(self.points)],
        }

    def _tick(self, tick: int) -> dict[str, object]:
        point, width = self.points[tick], self.width_s(tick)
        p50, p99, top = point.latency.percentiles((50.0, 99.0, 100.0))
        return {
            "t_s": round(tick * self._plan.tick_s, 3),
            "messages": point.messages,
            "messages_per_s": round(point.messages / width, 1),
            "mb_per_s": round(point.payload_bytes / width / 1e6, 3),
            "p50_ms": p50 / 1000,
            "p99_ms": p99 / 1000,
            "max_ms": top / 1000,
        }
