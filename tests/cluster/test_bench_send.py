"""How a benchmark sends: open loops count from the intended times, whatever the server does."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from raymq.cluster.bench.job import BenchClock, Job, SendResult, Snapshot
from raymq.cluster.bench.plan import BenchPlan
from raymq.cluster.bench.send import Done, Schedule, Sending
from raymq.cluster.bench.series import Series
from raymq.store.base.errors import DeliveryUnknown, Rejected, Unavailable
from tests.support.clock import ManualClock


class ManualBenchClock(ManualClock, BenchClock):
    """Waiting lets the time pass, unless what is waited for is so."""

    def wall_us(self) -> int:
        return self.now_ms() * 1000

    def wait_for(
        self, changed: threading.Condition, ready: Callable[[], bool], timeout_s: float
    ) -> None:
        if not ready():
            self.advance(max(1, math.ceil(timeout_s * 1000)))


class Server:
    """Answers each batch after the time that `delay_ms` gives for its number. The sender waits."""

    def __init__(
        self, clock: ManualBenchClock, delay_ms: Callable[[int], float], error: Any = None
    ) -> None:
        self.clock = clock
        self.delay_ms = delay_ms
        self.error = error
        self.sends: list[tuple[float, int]] = []

    def prepare(self, topic: str) -> None:
        pass

    def send(self, topic: str, queue_id: int, rows: pa.RecordBatch, done: Done) -> None:
        self.sends.append((self.clock.monotonic(), rows.num_rows))
        self.clock.advance(self.delay_ms(len(self.sends)))
        done(0, rows.num_rows, self.error)

    def close(self) -> None:
        pass


def run(
    delay_ms: Callable[[int], float], *, error: Any = None, rows: int | None = None, **options: Any
) -> tuple[Series, SendResult, Server]:
    """One worker's whole run. Returns: its figures, its result, the server."""
    given: dict[str, Any] = {"workers": 1, "warmup_s": 0.0, "duration_s": 2.0, **options}
    plan, clock = BenchPlan(**given), ManualBenchClock()
    server, series = Server(clock, delay_ms, error), Series(plan)
    sending = Sending(Job(plan, "produce", rows=rows), server, clock)
    sent = None
    for item in sending.run(clock.monotonic()):
        if isinstance(item, Snapshot):
            series.add(item)
        else:
            sent = item
    assert sent is not None
    return series, sent, server


def test_an_open_loop_sends_each_message_when_it_is_due() -> None:
    series, sent, server = run(lambda _: 0, rate=100.0, batch=10, linger_ms=0.0)
    assert [count for _, count in server.sends] == [1] * len(server.sends)
    assert len(server.sends) == 200
    assert sent.ledger.acknowledged == 200
    assert series.latency.max <= 1000
    assert series.messages_per_s() == pytest.approx(100, rel=0.01)


def test_a_stall_counts_from_the_intended_times_of_all_that_were_due_in_it() -> None:
    # One answer takes a second: a worker that counted from its sends would see one slow message.
    series, sent, server = run(
        lambda n: 1000 if n == 51 else 0, rate=100.0, batch=10, linger_ms=0.0
    )
    latency = series.latency
    assert sent.ledger.acknowledged == latency.count == 200
    assert latency.max >= 1_000_000
    assert latency.percentile(75) == pytest.approx(500_000, rel=0.05)
    slow = 100 * (1 - 100 / 200)
    assert latency.percentile(slow - 1) <= 20_000
    # The messages that piled up go in full batches.
    assert [count for _, count in server.sends if count > 1] == [10] * 10
    assert sent.unsent == 0


def test_what_could_not_be_sent_counts_with_the_time_that_it_waited() -> None:
    series, sent, _ = run(lambda n: 60_000 if n == 101 else 0, rate=100.0, batch=10, linger_ms=0.0)
    assert sent.unsent + sent.ledger.acknowledged == series.latency.count == 200
    assert sent.unsent == pytest.approx(100, abs=2)
    assert series.latency.percentile(90) > 59_000_000
    assert series.messages() == pytest.approx(100, abs=2)


def test_linger_lets_batches_grow_and_counts_as_latency() -> None:
    series, _, server = run(lambda _: 0, rate=1000.0, batch=100, linger_ms=20.0)
    counts = [count for _, count in server.sends[:-1]]
    assert min(counts) >= 20
    assert max(counts) <= 23
    assert 19_000 <= series.latency.max <= 23_000


def test_a_full_batch_does_not_linger() -> None:
    schedule = Schedule(BenchPlan(workers=1, rate=1000.0, batch=10, linger_ms=500.0), 0, start=5.0)
    assert schedule.take(5.008) is None
    assert schedule.next_time(5.008) == pytest.approx(5.009)
    due = schedule.take(5.0091)
    assert due is not None
    assert due.tolist() == pytest.approx([5.0 + n / 1000 for n in range(10)])


def test_workers_of_an_open_loop_take_turns() -> None:
    plan = BenchPlan(workers=4, rate=100.0)
    assert [Schedule(plan, worker, 0.0).due(0) for worker in range(5)] == [
        0.0,
        0.01,
        0.02,
        0.03,
        0.0,
    ]


def test_a_closed_loop_counts_from_the_send_and_stops_at_the_end() -> None:
    series, sent, server = run(lambda _: 50, batch=10, in_flight=1)
    assert len(server.sends) == 40
    assert sent.ledger.acknowledged == 400
    assert series.latency.percentile(50) == pytest.approx(50_000, rel=0.01)
    assert series.messages_per_s() == pytest.approx(200, rel=0.05)


def test_the_warm_up_is_in_no_figure_but_in_the_ledger() -> None:
    series, sent, _ = run(lambda n: 500 if n == 1 else 50, batch=10, in_flight=1, warmup_s=1.0)
    assert series.latency.max < 51_000
    assert sent.ledger.acknowledged > series.messages()


def test_a_number_of_rows_is_sent_to_the_last() -> None:
    _, sent, server = run(lambda _: 1, batch=30, rows=100)
    assert [count for _, count in server.sends] == [30, 30, 30, 10]
    assert sent.ledger.acknowledged == 100


@pytest.mark.parametrize(
    ("error", "refused"),
    [(Unavailable("no"), True), (DeliveryUnknown("who knows", status="UNKNOWN_ERROR"), False)],
)
def test_what_failed_is_refused_or_open_but_never_promised(error: Any, refused: bool) -> None:
    series, sent, server = run(lambda _: 50, error=error, batch=10)
    ledger = sent.ledger
    assert (ledger.acknowledged, series.messages()) == (0, 0)
    assert (ledger.refused if refused else ledger.unknown) == 10 * len(server.sends)
    assert sent.errors == {type(error).__name__: len(server.sends)}


def test_what_trying_again_does_not_mend_ends_the_worker() -> None:
    with pytest.raises(Rejected):
        run(lambda _: 50, error=Rejected("too large", field="body"), batch=10)
