"""The options of a benchmark, and the distributions of sizes and keys. Does not import Ray."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from raymq.store.base.arrays import Int64s
from raymq.store.base.errors import Rejected
from raymq.store.config.promise import Acks

Rng = np.random.Generator

#: a body begins with the fields of verification (messages.HEADER)
BODY_BYTES_MIN = 48
#: the default limit of a shard
BODY_BYTES_MAX = 4 << 20
KEYS_MAX = 1_000_000
#: a batch's bodies are one Arrow column with 32-bit offsets, and are copied more than once on their way
BATCH_BYTES_MAX = 128 << 20
RATE_MAX = 10_000_000
#: a week
SECONDS_MAX = 604_800
#: ticks of a report at most
TICKS_MAX = 600


@dataclass(frozen=True)
class FixedSize:
    """Every body has the same size."""

    size: int

    @property
    def mean(self) -> float:
        """The mean size in bytes, as of the other distributions."""
        return float(self.size)

    def draw(self, rng: Rng, count: int) -> Int64s:
        """The size, `count` times."""
        return np.full(count, self.size, dtype=np.int64)


@dataclass(frozen=True)
class UniformSize:
    """Every size from `low` to `high` (both included) is equally likely."""

    low: int
    high: int

    @property
    def mean(self) -> float:
        """The middle of the range."""
        return (self.low + self.high) / 2

    def draw(self, rng: Rng, count: int) -> Int64s:
        """Sizes in bytes."""
        return rng.integers(self.low, self.high, size=count, endpoint=True, dtype=np.int64)


@dataclass(frozen=True)
class LognormalSize:
    """Half of the bodies are smaller than `median`. The logarithm's standard deviation is `sigma`."""

    median: int
    sigma: float

    @property
    def mean(self) -> float:
        """The mean of the distribution before it is cut, or the longest body if that is less."""
        return min(self.median * math.exp(self.sigma**2 / 2), float(BODY_BYTES_MAX))

    def draw(self, rng: Rng, count: int) -> Int64s:
        """Sizes in bytes, cut to the limits of a body."""
        drawn = rng.lognormal(math.log(self.median), self.sigma, count)
        return np.clip(drawn, BODY_BYTES_MIN, BODY_BYTES_MAX).astype(np.int64)


#: a distribution of body sizes
Sizes = FixedSize | UniformSize | LognormalSize


@dataclass(frozen=True)
class Keys:
    """`count` different keys, equally likely (`skew` 0) or the n-th by 1 / n ** skew (Zipf)."""

    count: int
    skew: float = 0.0

    def weights(self) -> npt.NDArray[np.float64]:
        """The cumulated probability of each key."""
        weights = np.arange(1, self.count + 1, dtype=np.float64) ** -self.skew
        total: npt.NDArray[np.float64] = np.cumsum(weights / weights.sum())
        return total


@dataclass(frozen=True, kw_only=True)
class BenchPlan:
    """All options of a benchmark. It is pickled to every worker."""

    #: send; read earlier messages; both at once, timed from sending to reading
    mode: Literal["produce", "consume", "e2e"] = "produce"
    #: topics are named `topic`, or `topic-0`, `topic-1` ... if there are several
    topic: str = "bench"
    topics: int = 1
    queues: int = 4
    #: only the queues on these shards are used; None: all
    shards: tuple[int, ...] | None = None
    #: processes that send (in mode consume: that read)
    workers: int = 2
    #: processes that read in mode e2e
    consumers: int = 1
    #: closed loop: unacknowledged batches per worker. An open loop is limited by full buffers only
    in_flight: int = 4
    #: rows of a batch at most
    batch: int = 1000
    #: messages per second of all workers together, sent when they are due; None: closed loop
    rate: float | None = None
    #: open loop: how long a message waits for a fuller batch
    linger_ms: float = 5.0
    duration_s: float = 10.0
    warmup_s: float = 2.0
    size: Sizes = FixedSize(1024)
    keys: Keys | None = None
    #: "columns" and "tasks" are for callers.py alone
    api: Literal["batches", "messages", "columns", "tasks"] = "batches"
    acks: Acks = "quorum"
    #: mode consume: messages that are sent before, unmeasured
    messages: int = 200_000
    #: number of the first worker: it keeps the rounds of one run apart
    first_worker: int = 0
    #: the indexes of the queues that are used, set at the start of a run; None: all
    used_indexes: tuple[int, ...] | None = None
    #: marks the messages of this run; 0 < run < 2**63
    run: int = 1

    def __post_init__(self) -> None:
        """Raises: Rejected naming the option, its limit and the advice."""
        for name, most in _COUNTS_MAX.items():
            _between(name, getattr(self, name), 1, most)
        if self.rate is not None:
            _between("rate", self.rate, 0, RATE_MAX, above=True)
        _between("duration_s", self.duration_s, 0, SECONDS_MAX, above=True)
        _between("warmup_s", self.warmup_s, 0, SECONDS_MAX)
        _between("linger_ms", self.linger_ms, 0, SECONDS_MAX * 1000)

        if self.rate is not None and self.mode == "consume":
            message = "rate with consume, which reads a backlog as fast as it can: leave --rate out, or use e2e"
            raise Rejected(message, field="rate", limit="produce, e2e")
        if self.shards is not None and self.keys is not None:
            message = "shards together with keys: a key chooses its queue, and so its shard; leave one of them out"
            raise Rejected(message, field="shards", limit="no keys")

        rows = int(BATCH_BYTES_MAX / self.size.mean)
        if self.batch > rows:
            message = (
                f"batch is {self.batch} rows of {self.size.mean:,.0f} bytes: a batch has up to "
                f"{BATCH_BYTES_MAX >> 20} MiB, which is {rows} of these"
            )
            raise Rejected(message, field="batch", limit=rows)

    @property
    def tick_s(self) -> float:
        """Seconds per tick: the duration is a whole number of ticks."""
        wanted = max(1.0, self.duration_s / TICKS_MAX)
        return self.duration_s / max(1, round(self.duration_s / wanted))

    @property
    def ticks(self) -> int:
        """Ticks of the measured part."""
        return round(self.duration_s / self.tick_s)

    @property
    def topic_names(self) -> list[str]:
        """The names of all topics."""
        if self.topics == 1:
            return [self.topic]
        return [f"{self.topic}-{number}" for number in range(self.topics)]

    def topic_and_queue(self, number: int) -> tuple[str, int]:
        """Topic and queue id of a queue index, which counts through all queues of all topics."""
        return self.topic_names[number // self.queues], number % self.queues

    @property
    def queue_indexes(self) -> Sequence[int]:
        """The indexes of the queues that are used."""
        return range(self.topics * self.queues) if self.used_indexes is None else self.used_indexes


#: option -> how many there may be
_COUNTS_MAX = {
    "topics": 10_000,
    "queues": 65_536,
    "workers": 1024,
    "consumers": 1024,
    "in_flight": 100_000,
    "batch": 1_000_000,
    "messages": 10**10,
}


def _between(name: str, value: float, low: float, high: float, *, above: bool = False) -> None:
    """Check a value. Raises: Rejected outside [low, high] (`above`: for low itself too) or for no number."""
    is_low = value <= low if above else value < low
    if is_low or not value <= high:
        limit = f"{f'more than {low:,}' if above else f'{low:,}'} to {high:,}"
        raise Rejected(f"{name} is {value}: use {limit}", field=name, limit=limit)


def check_limit_ms(limit_ms: float) -> None:
    """Check the limit of the search for the highest rate. Raises: Rejected."""
    _between("find_max", limit_ms, 0, SECONDS_MAX * 1000, above=True)


def parse_shards(text: str) -> tuple[int, ...]:
    """`0,2`: shard numbers. Raises: Rejected."""
    try:
        numbers = tuple(sorted({int(word) for word in text.split(",")}))
        if numbers[0] < 0:
            raise ValueError
    except ValueError as error:
        message = f"shards is {text!r}: use numbers from 0 on, as in 0,2"
        raise Rejected(message, field="shards", limit="0,1,...") from error
    return numbers


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
        message = f"keys is {text!r}: use none, uniform:K or zipf:K[:SKEW] with K up to {KEYS_MAX}"
        raise Rejected(message, field="keys", limit=f"1 to {KEYS_MAX}") from error
    return keys


def plan_of(options: Mapping[str, Any]) -> BenchPlan:
    """The plan of a command's options. Options that are None or not a field of a plan are left out.

    Raises: Rejected.
    """
    names = {field.name for field in fields(BenchPlan)}
    given = {name: value for name, value in options.items() if name in names and value is not None}
    for name, parse in (("size", parse_size), ("keys", parse_keys), ("shards", parse_shards)):
        if name in given:
            given[name] = parse(given[name])
    return BenchPlan(**given)
