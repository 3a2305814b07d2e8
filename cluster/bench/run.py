"""A whole benchmark: topics, workers, merged figures, verification, the highest rate."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from raymq.cluster.cluster import Cluster
from raymq.cluster.deploy import ray_host
from raymq.cluster.deploy.ray_host import RayTarget
from raymq.store.base.errors import Rejected, Unavailable

from .check import Ledger, ReadRange, Verdict, promised_rows
from .job import READY, Job, ReceiveResult, SendResult, Snapshot
from .plan import BenchPlan, check_limit_ms
from .series import Series
from .worker_pool import LEAD_S, LocalWorkers, RayWorkers, WorkerPool

Runner = Literal["auto", "ray", "processes"]

#: how long workers may take to start: a busy machine imports slowly
START_TIMEOUT_S = 120.0
_EVENT_WAIT_S = 0.2
#: messages may be acknowledged before they are visible (transient pool, slow follower): the run waits for them until
#: nothing became visible for this many seconds
VISIBLE_S = 10.0
#: the part of a rate that must be acknowledged within the time for the rate to count as kept up
KEPT_UP = 0.98
#: the search for the highest rate ends when the result is this close, or after this many rounds
SEARCH_PRECISION = 0.05
SEARCH_ROUNDS = 8


class QueueEnd(NamedTuple):
    """The shard of a queue, and the offset after its last message."""

    shard: int
    end: int


#: by queue index
QueueEnds = dict[int, QueueEnd]


class Watcher:
    """Receives the progress of a run. This one ignores it. See progress.py."""

    def phase(self, text: str, seconds: float | None) -> None:
        """Another phase begins, which takes about `seconds`."""

    def figures(self, round_: Round) -> None:
        """There are new figures."""

    def done(self) -> None:
        """The run is over."""


@dataclass
class Round:
    """The reports of the workers of one round."""

    plan: BenchPlan
    #: channel -> its figures
    series: dict[str, Series] = field(default_factory=dict)
    sent: list[SendResult] = field(default_factory=list)
    received: list[ReceiveResult] = field(default_factory=list)
    #: the faults found when the log was read back
    verdict: Verdict = field(default_factory=Verdict)

    def take(self, item: object) -> None:
        """Add one item that a worker reported."""
        if isinstance(item, Snapshot):
            self.series.setdefault(item.channel, Series(self.plan)).add(item)
        elif isinstance(item, SendResult):
            self.sent.append(item)
        elif isinstance(item, ReceiveResult):
            self.received.append(item)
        elif isinstance(item, Verdict):
            self.verdict.add(item)

    @property
    def ledgers(self) -> list[Ledger]:
        """All promises."""
        return [sent.ledger for sent in self.sent]

    @property
    def unsent(self) -> int:
        """Messages that were due and not sent."""
        return sum(sent.unsent for sent in self.sent)

    @property
    def errors(self) -> dict[str, int]:
        """Kind of error -> batches."""
        total: Counter[str] = Counter()
        for sent in self.sent:
            total.update(sent.errors)
        return dict(total)

    def channel(self) -> str:
        """The channel that the mode is about."""
        return {"produce": "send", "consume": "poll", "e2e": "receive"}[self.plan.mode]


@dataclass
class Outcome:
    """A whole run."""

    plan: BenchPlan
    #: "ray" or "processes"
    runner: str
    cluster: dict[str, Any]
    #: the round that counts: the only one, or the best of the search
    round: Round
    #: the faults in the log; None: not asked for
    verdict: Verdict | None
    #: the faults at the run's consumers; None: there were none
    consumed: Verdict | None
    #: of the search for the highest rate: each round's rate, figures and whether it was kept up
    search: list[dict[str, Any]] = field(default_factory=list)
    #: milliseconds that the 99th percentile may have in the search
    limit_ms: float | None = None

    @property
    def sound(self) -> bool:
        """Nothing was lost, hidden, repeated, out of order, damaged or left unread."""
        return not any(verdict and verdict.faults for verdict in (self.verdict, self.consumed))


class Bench:
    """Runs rounds of one plan against one cluster, and verifies them all at the end."""

    def __init__(
        self,
        cluster: Cluster,
        plan: BenchPlan,
        *,
        runner: Runner = "auto",
        watcher: Watcher | None = None,
    ) -> None:
        self._cluster = cluster
        self._plan = replace(plan, run=secrets.randbelow(2**62) + 1)
        self._watcher = watcher or Watcher()

        reachable = cluster.ray_address is not None
        if runner == "ray" and not reachable:
            message = (
                "the cluster's Ray is not known from here: use --runner processes, or name the cluster by its data "
                "directory or name instead of raymq://"
            )
            raise Rejected(message, field="runner", limit="processes")

        self._runner = "ray" if reachable and runner != "processes" else "processes"
        self._ray: Any = None

        #: the queues at the begin of this run
        self._begin: QueueEnds = {}
        self._ledgers: list[Ledger] = []
        self._consumed: Verdict | None = None

    def run(self, *, find_max_ms: float | None = None, verify: bool = True) -> Outcome:
        """One round, or with `find_max_ms` the search for the highest rate whose p99 stays below it.

        Raises: Rejected for a plan that cannot be run here; the error that ended a worker.
        """
        if find_max_ms is not None:
            check_limit_ms(find_max_ms)
            if self._plan.rate or self._plan.mode == "consume":
                message = "the search finds the rate itself, of produce or e2e: leave --rate out"
                raise Rejected(message, field="find_max", limit="no rate")

        with contextlib.ExitStack() as stack:
            stack.callback(self._watcher.done)
            if self._runner == "ray":
                self._ray = stack.enter_context(ray_host.session(self._target()))
            for name in self._plan.topic_names:
                self._cluster.create_topic(name, queues=self._plan.queues)
            self._begin = self._ends()
            self._choose_queues()

            search: list[dict[str, Any]] = []
            if find_max_ms is None:
                best = self._round(self._plan)
            else:
                best = self._search(find_max_ms, search)

            return Outcome(
                plan=best.plan,
                runner=self._runner,
                cluster=self._cluster.describe(),
                round=best,
                verdict=self._verify() if verify else None,
                consumed=self._consumed,
                search=search,
                limit_ms=find_max_ms,
            )

    def _choose_queues(self) -> None:
        """Keep the queues of the chosen shards.

        Raises: Rejected for a shard that does not exist or has no queue of the topics.
        """
        shards = self._plan.shards
        if shards is None:
            return

        for shard in shards:
            if shard >= self._cluster.shards:
                message = f"shards names {shard}: the cluster has 0 to {self._cluster.shards - 1}"
                raise Rejected(message, field="shards", limit=self._cluster.shards - 1)
            if all(shard != other for other, _ in self._begin.values()):
                message = (
                    f"shards names {shard}, which has none of the {self._plan.queues} queues of a topic: use at least "
                    f"--queues {self._cluster.shards}, or another --topic"
                )
                raise Rejected(message, field="shards", limit=self._plan.queues)

        used = tuple(
            queue_index for queue_index, (shard, _) in self._begin.items() if shard in shards
        )
        self._plan = replace(self._plan, used_indexes=used)

    def _target(self) -> RayTarget:
        """The cluster's Ray, with its authentication if the data directory is on this machine."""
        found = ray_host.running_target_of(self._cluster.data_dir)
        return found or RayTarget(address=str(self._cluster.ray_address))

    # --- rounds -----------------------------------------------------------------------------------

    def _round(self, plan: BenchPlan) -> Round:
        if plan.mode == "consume":
            return self._consume(plan)
        senders = [
            Job(plan, "produce", worker=plan.first_worker + number)
            for number in range(plan.workers)
        ]
        jobs = [*senders, *(self._readers(plan) if plan.mode == "e2e" else [])]
        rate = "" if plan.rate is None else f" at {plan.rate:,.0f} messages/s"
        found = self._work(plan, f"{plan.mode}{rate}", jobs, plan.warmup_s + plan.duration_s)
        self._check(found)
        return found

    def _consume(self, plan: BenchPlan) -> Round:
        """Send a backlog, then read it."""
        plan = replace(plan, warmup_s=0.0)
        each = -(-plan.messages // plan.workers)
        fill = [Job(plan, "produce", worker=number, rows=each) for number in range(plan.workers)]
        filled = self._work(plan, f"sending {plan.messages:,} messages", fill, None)
        self._check(filled)
        ranges = self._ranges()
        shares = _shares(ranges, plan.workers)
        jobs = [Job(plan, "read", ranges=share) for share in shares]
        found = self._work(plan, "consume", jobs, None)
        found.sent = filled.sent
        found.series["poll"].seconds = max(each.seconds for each in found.received)
        self._compare_received(found)
        return found

    def _readers(self, plan: BenchPlan) -> list[Job]:
        ranges = [
            ReadRange(queue_index, shard, end, -1)
            for queue_index, (shard, end) in self._visible_ends().items()
        ]
        shares = _shares(ranges, plan.consumers)
        return [Job(plan, "read", ranges=share, live=True) for share in shares]

    def _work(
        self, plan: BenchPlan, text: str, jobs: Sequence[Job], seconds: float | None
    ) -> Round:
        """Run the jobs in workers. Returns: everything that they reported."""
        found = Round(plan)
        sending = {number for number, job in enumerate(jobs) if job.kind == "produce"}
        live = any(job.live for job in jobs)
        self._watcher.phase(f"starting {len(jobs)} workers ({self._runner})", None)

        with contextlib.closing(self._pool(jobs)) as pool:
            _start(pool, len(jobs))
            self._watcher.phase(text, seconds)
            running = set(range(len(jobs)))
            while running:
                for number, item in pool.events(_EVENT_WAIT_S):
                    found.take(item)
                    if item is None:
                        running.discard(number)
                self._watcher.figures(found)
                if live and sending and not sending & running:
                    sending.clear()
                    ends = self._visible_ends(found.ledgers)
                    pool.end({queue_index: queue.end for queue_index, queue in ends.items()})

        if live:
            self._compare_received(found)
        self._ledgers += found.ledgers
        return found

    def _pool(self, jobs: Sequence[Job]) -> WorkerPool:
        if self._runner == "ray":
            return RayWorkers(self._ray, self._cluster, jobs)
        return LocalWorkers(self._cluster, jobs)

    def _check(self, found: Round) -> None:
        """Check that a round counts. Raises: Unavailable when nothing at all was acknowledged."""
        if not any(ledger.acknowledged for ledger in found.ledgers):
            why = next((sent.first_error for sent in found.sent if sent.first_error), "no answer")
            raise Unavailable(f"not one message was acknowledged: {why}", field="bench")

    def _compare_received(self, found: Round) -> None:
        """Compare the rows that the consumers got with the acknowledged rows."""
        verdict = self._consumed = self._consumed or Verdict()
        got: dict[tuple[int, int], int] = {}

        for each in found.received:
            verdict.add(each.verdict)
            got.update(each.rows)

        for ledger in found.ledgers:
            verdict.acknowledged += ledger.acknowledged
            for queue_index, promised in ledger.queues.items():
                wanted = sum(end - first for first, end in promised.acknowledged)
                missing = wanted - got.get((ledger.worker, queue_index), 0)
                if missing > 0:
                    verdict.unread += missing
                    topic, queue = found.plan.topic_and_queue(queue_index)
                    verdict.note(
                        f"worker {ledger.worker}, {topic} queue {queue}: {missing} acknowledged rows did not come"
                    )

    # --- offsets and verification -----------------------------------------------------------------

    def _ends(self) -> QueueEnds:
        """The ends of all queues now."""
        return {
            topic * self._plan.queues + queue["queue_id"]: QueueEnd(
                queue["shard"], queue["max_offset"]
            )
            for topic, name in enumerate(self._plan.topic_names)
            for queue in self._cluster.describe_topic(name)["queues"]
        }

    def _visible_ends(self, ledgers: Sequence[Ledger] = ()) -> QueueEnds:
        """As `_ends`, once readers see the acknowledged rows of this run and of `ledgers`.

        With flush=async and a transient pool, or acks=leader and followers, that is later than the
        receipt. Gives up when the ends have not moved for VISIBLE_S.
        """
        promised = promised_rows([*self._ledgers, *ledgers])
        before: QueueEnds = {}
        deadline_s = 0.0

        while True:
            ends = self._ends()
            if all(
                ends[queue_index].end - self._begin[queue_index].end >= rows
                for queue_index, rows in promised.items()
            ):
                return ends

            now = time.monotonic()
            if ends != before:
                before, deadline_s = ends, now + VISIBLE_S
            if now >= deadline_s:
                return ends
            time.sleep(_EVENT_WAIT_S / 4)

    def _ranges(self) -> list[ReadRange]:
        """The messages that this run stored, by queue index."""
        return [
            ReadRange(queue_index, shard, self._begin[queue_index].end, end)
            for queue_index, (shard, end) in self._visible_ends().items()
        ]

    def _verify(self) -> Verdict:
        """Read everything back, with as many workers as sent."""
        plan, ranges = self._plan, self._ranges()
        jobs = [
            Job(plan, "verify", ranges=share, ledgers=tuple(self._ledgers))
            for share in _shares(ranges, plan.workers)
        ]
        total = sum(span.end - span.start for span in ranges)
        return self._work(plan, f"reading {total:,} messages back", jobs, None).verdict

    # --- the highest rate -------------------------------------------------------------------------

    def _search(self, limit_ms: float, tried: list[dict[str, Any]]) -> Round:
        """Halve the interval of rates until it is small. Each round is a whole open loop.

        Raises: Rejected when not even the lowest rate tried stays below the limit.
        """
        plan = self._plan
        closed = self._round(plan)
        # In a short measured part on a busy machine there may be nothing. In the whole round there is.
        acknowledged = sum(ledger.acknowledged for ledger in closed.ledgers)
        overall = acknowledged / (plan.warmup_s + plan.duration_s)
        low, high = 0.0, 1.5 * max(closed.series["send"].messages_per_s(), overall)

        best: Round | None = None
        for number in range(1, SEARCH_ROUNDS + 1):
            rate = (low + high) / 2
            first = plan.first_worker + number * plan.workers
            found = self._round(replace(plan, rate=rate, first_worker=first))
            facts = judge(found, limit_ms)
            tried.append(facts)
            if facts["kept_up"]:
                low, best = rate, found
            else:
                high = rate
            if best is not None and high - low <= SEARCH_PRECISION * high:
                break

        if best is None:
            last = tried[-1]
            message = (
                f"not even {last['rate']:,.0f} messages/s are kept up with p99 up to {limit_ms:g} ms: "
                f"{last['achieved']:,.0f} messages/s, p99 {last['p99_ms']:g} ms. Allow more, measure longer "
                "(--duration-s), or find what slows the cluster down"
            )
            raise Rejected(message, field="find_max", limit=limit_ms)

        return best


def judge(found: Round, limit_ms: float) -> dict[str, object]:
    """Whether a round's rate was kept up with a p99 below the limit, and its figures."""
    series = found.series[found.channel()]
    rate = found.plan.rate or 0.0
    achieved, p99_ms = series.messages_per_s(), series.latency.percentile(99.0) / 1000
    kept_up = achieved >= KEPT_UP * rate and p99_ms <= limit_ms and not found.errors
    return {
        "rate": round(rate, 1),
        "achieved": round(achieved, 1),
        "p99_ms": p99_ms,
        "unsent": found.unsent,
        "kept_up": kept_up and not found.unsent,
    }


def _shares(ranges: list[ReadRange], parts: int) -> list[tuple[ReadRange, ...]]:
    """Ranges spread over up to `parts` shares that are not empty, the long ranges first."""
    shares: list[list[ReadRange]] = [[] for _ in range(parts)]
    for span in sorted(ranges, key=lambda span: span.start - span.end):
        shortest = min(shares, key=lambda share: (sum(p.end - p.start for p in share), len(share)))
        shortest.append(span)
    return [tuple(share) for share in shares if share]


def _start(pool: WorkerPool, workers: int) -> None:
    """Wait until all workers are ready, then let them begin together. Raises: Unavailable."""
    ready, deadline_s = 0, time.monotonic() + START_TIMEOUT_S
    while ready < workers:
        if time.monotonic() > deadline_s:
            raise Unavailable(
                f"{workers - ready} of {workers} workers did not start within "
                f"{START_TIMEOUT_S:.0f} s; use fewer --workers",
                field="workers",
            )
        ready += sum(item == READY for _, item in pool.events(_EVENT_WAIT_S))
    pool.go(time.time() + LEAD_S)
