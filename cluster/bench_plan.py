"""What a benchmark does: its options, and the distributions of sizes and keys. Imports no Ray."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from raymq.store.errors import Rejected

Int64s = npt.NDArray[np.int64]
Rng = np.random.Generator

#: a body begins with what verification needs (bench_messages.HEADER)
BODY_BYTES_MIN = 48
#: the default limit of a shard
BODY_BYTES_MAX = 4 << 20
KEYS_MAX = 1_000_000
#: points in time of a report at most
TICKS_MAX = 600


class Sizes(Protocol):
    """A distribution of body sizes."""

    def draw(self, rng: Rng, count: int) -> Int64s:
        """`count` sizes in bytes."""


@dataclass(frozen=True)
class FixedSize:
    """Every body has so many bytes."""

    size: int

    def draw(self, rng: Rng, count: int) -> Int64s:
        """The size, `count` times."""
        return np.full(count, self.size, dtype=np.int64)


@dataclass(frozen=True)
class UniformSize:
    """Every size from `low` to `high` (both included) is as likely."""

    low: int
    high: int

    def draw(self, rng: Rng, count: int) -> Int64s:
        """Sizes in bytes."""
        return rng.integers(self.low, self.high, size=count, endpoint=True, dtype=np.int64)


@dataclass(frozen=True)
class LognormalSize:
    """Half of the bodies are smaller than `median`; the logarithm's standard deviation is `sigma`."""

    median: int
    sigma: float

    def draw(self, rng: Rng, count: int) -> Int64s:
        """Sizes in bytes, cut to what a body may have."""
        drawn = rng.lognormal(math.log(self.median), self.sigma, count)
        return np.clip(drawn, BODY_BYTES_MIN, BODY_BYTES_MAX).astype(np.int64)


@dataclass(frozen=True)
class Keys:
    """`count` different keys, each as likely (`skew` 0) or the n-th by 1 / n ** skew (Zipf)."""

    count: int
    skew: float = 0.0

    def weights(self) -> npt.NDArray[np.float64]:
        """The cumulated probability of each key."""
        weights = np.arange(1, self.count + 1, dtype=np.float64) ** -self.skew
        total: npt.NDArray[np.float64] = np.cumsum(weights / weights.sum())
        return total


@dataclass(frozen=True, kw_only=True)
class BenchPlan:
    """Everything that says what a benchmark does; pickles to every worker."""

    #: send; read what was sent before; both at once, timed from sending to reading
    mode: Literal["produce", "consume", "e2e"] = "produce"
    #: topics are named `topic`, or `topic-0`, `topic-1` ... where there are several
    topic: str = "bench"
    topics: int = 1
    queues: int = 4
    #: processes that send (in mode consume: that read)
    workers: int = 2
    #: processes that read in mode e2e
    consumers: int = 1
    #: closed loop: batches that a worker has unanswered. An open loop is only held by full buffers
    in_flight: int = 4
    #: rows of a batch at most
    batch: int = 1000
    #: messages a second of all workers together, sent when they are due; None: closed loop
    rate: float | None = None
    #: open loop: how long a message waits for a fuller batch
    linger_ms: float = 5.0
    duration_s: float = 10.0
    warmup_s: float = 2.0
    size: Sizes = FixedSize(1024)
    keys: Keys | None = None
    api: Literal["batches", "messages"] = "batches"
    acks: Literal["quorum", "leader"] = "quorum"
    #: mode consume: messages that are sent before, unmeasured
    messages: int = 200_000
    #: number of the first worker, so that several rounds of one run stay apart
    first_worker: int = 0
    #: tells the messages of this run from all others; 0 < run < 2**63
    run: int = 1

    def __post_init__(self) -> None:
        """Raises: Rejected naming the option, its limit and what to do."""
        for name in ("topics", "queues", "workers", "consumers", "in_flight", "batch", "messages"):
            _at_least(name, getattr(self, name), 1)
        if self.rate is not None and not 0 < self.rate < math.inf:
            raise Rejected(f"rate is {self.rate:g}", field="rate", limit="more than 0 messages/s")
        if self.rate is not None and self.mode == "consume":
            raise Rejected(
                "consume reads a backlog as fast as it comes: leave --rate away, or use e2e",
                field="rate",
                limit="produce, e2e",
            )
        if self.duration_s <= 0 or self.warmup_s < 0 or self.linger_ms < 0:
            raise Rejected(
                f"duration {self.duration_s:g} s, warm-up {self.warmup_s:g} s, linger "
                f"{self.linger_ms:g} ms: a duration is above 0, the others not below",
                field="duration",
                limit="> 0",
            )

    @property
    def tick_s(self) -> float:
        """Seconds of a point in time: the duration is a whole number of them."""
        wanted = max(1.0, self.duration_s / TICKS_MAX)
        return self.duration_s / max(1, round(self.duration_s / wanted))

    @property
    def ticks(self) -> int:
        """Points in time of the measured part."""
        return round(self.duration_s / self.tick_s)

    @property
    def topic_names(self) -> list[str]:
        """The names of all topics."""
        if self.topics == 1:
            return [self.topic]
        return [f"{self.topic}-{number}" for number in range(self.topics)]

    def lane(self, number: int) -> tuple[str, int]:
        """Topic and queue of a lane; lanes count through all queues of all topics."""
        return self.topic_names[number // self.queues], number % self.queues

    @property
    def lanes(self) -> int:
        """Queues of all topics."""
        return self.topics * self.queues


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise Rejected(f"{name} is {value}", field=name, limit=f"at least {least}")


def parse_size(text: str) -> Sizes:
    """`1024`, `fixed:1024`, `uniform:100-2000` or `lognormal:1024` (median) or `lognormal:1024:0.8`.

    Raises: Rejected.
    """
    kind, _, rest = text.partition(":") if ":" in text else ("fixed", "", text)
    try:
        if kind == "fixed":
            sizes: Sizes = FixedSize(_size(rest))
        elif kind == "uniform":
            low, _, high = rest.partition("-")
            sizes = UniformSize(_size(low), _size(high))
            if sizes.low > sizes.high:
                raise ValueError
        elif kind == "lognormal":
            median, _, sigma = rest.partition(":")
            sizes = LognormalSize(_size(median), float(sigma or 1.0))
            if not 0 <= sizes.sigma <= 4:
                raise ValueError
        else:
            raise ValueError
    except ValueError as error:
        raise Rejected(
            f"size is {text!r}: use N, uniform:LOW-HIGH or lognormal:MEDIAN[:SIGMA], with "
            f"{BODY_BYTES_MIN} to {BODY_BYTES_MAX} bytes and SIGMA up to 4",
            field="size",
            limit=f"{BODY_BYTES_MIN} to {BODY_BYTES_MAX}",
        ) from error
    return sizes


def _size(text: str) -> int:
    size = int(text)
    if not BODY_BYTES_MIN <= size <= BODY_BYTES_MAX:
        raise ValueError(size)
    return size


def parse_keys(text: str) -> Keys | None:
    """`none`, `uniform:K`, or `zipf:K` (skew 1) or `zipf:K:SKEW`. Raises: Rejected."""
    if text == "none":
        return None
    kind, _, rest = text.partition(":")
    count, _, skew = rest.partition(":")
    try:
        keys = Keys(int(count), float(skew or 1.0) if kind == "zipf" else 0.0)
        if kind not in ("uniform", "zipf") or (kind == "uniform" and skew):
            raise ValueError
        if not 1 <= keys.count <= KEYS_MAX or not 0 <= keys.skew <= 10:
            raise ValueError
    except ValueError as error:
        raise Rejected(
            f"keys is {text!r}: use none, uniform:K or zipf:K[:SKEW] with K up to {KEYS_MAX}",
            field="keys",
            limit=f"1 to {KEYS_MAX}",
        ) from error
    return keys


def plan_of(options: Mapping[str, Any]) -> BenchPlan:
    """The plan of a command's options; what is None or no field of a plan is left out.

    Raises: Rejected.
    """
    names = {field.name for field in fields(BenchPlan)}
    given = {name: value for name, value in options.items() if name in names and value is not None}
    if "size" in given:
        given["size"] = parse_size(given["size"])
    if "keys" in given:
        given["keys"] = parse_keys(given["keys"])
    return BenchPlan(**given)
