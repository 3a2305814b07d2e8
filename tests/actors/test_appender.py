"""Puts of many threads, appended in groups."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from raymq.actors.api.shard_api import PutTicket
from raymq.actors.leader.appender import GROUP_BYTES_MAX, LARGE_BYTES, AppendedPut, Appender
from raymq.store.base.errors import Bug, RayMQError, Rejected, Unavailable
from raymq.store.records.requests import PutOutcome, PutRequest
from tests.support.batches import batch
from tests.support.waiting import until

LARGE = batch([b"x" * (LARGE_BYTES + 1)])
SMALL = batch([b"x"])


class Log:
    """Records each append, its thread and its group. Appends wait while the gate is closed."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.appended: list[tuple[int, threading.Thread]] = []
        self.groups: list[list[int]] = []
        self.refuse: dict[int, Exception] = {}
        self.appender = Appender(self.append, self.report_appended)
        self.stopping = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        self.appender.run(lambda: self.stopping)

    def start(self) -> None:
        self._thread.start()

    def append(self, puts: list[Any]) -> list[Any]:
        self.gate.wait(30)
        numbers = [checked.request.first_sequence for checked in puts]
        for number in numbers:
            if not isinstance(self.refuse.get(number), RayMQError | None):
                raise self.refuse[number]
        me = threading.current_thread()
        self.appended += [(number, me) for number in numbers if number not in self.refuse]
        return [self.refuse.get(number, number) for number in numbers]

    def report_appended(self, made: list[AppendedPut]) -> list[PutTicket]:
        self.groups.append([put.appended for put in made])  # type: ignore[misc]
        for put in made:
            put.ticket.finish(PutOutcome(0, 1, 0, 0, 0, 0))
        return [put.ticket for put in made]

    def put(self, number: int, data: Any = SMALL) -> tuple[PutTicket, bool]:
        request = PutRequest("t", 0, data, None, 0, number, "quorum")
        ticket = PutTicket(None)
        taken = self.appender.put([(ticket, SimpleNamespace(request=request))])  # type: ignore[list-item]
        return ticket, taken

    def numbers(self) -> list[int]:
        return [number for number, _ in self.appended]

    def close(self) -> None:
        self.gate.set()
        self.stopping = True
        self.appender.wake()
        if self._thread.ident is not None:
            self._thread.join(30)


@pytest.fixture
def log() -> Iterator[Log]:
    made = Log()
    yield made
    made.close()


def wait_until(condition: Callable[[], bool]) -> None:
    until(condition, lambda: threading.Event().wait(0.005))


def test_a_small_put_is_appended_by_the_thread_that_brings_it(log: Log) -> None:
    ticket, taken = log.put(0)
    assert taken
    assert ticket.done
    assert log.appended == [(0, threading.current_thread())]


def test_a_large_put_and_those_queued_after_it_are_left_to_the_shards_thread(log: Log) -> None:
    log.start()
    log.gate.clear()
    tickets = [log.put(0, LARGE)[0], log.put(1, LARGE)[0], log.put(2)[0]]
    assert log.appended == []
    log.gate.set()
    for ticket in tickets:
        ticket.wait(30)
    assert log.numbers() == [0, 1, 2]
    assert threading.current_thread() not in {thread for _, thread in log.appended}


def test_a_thread_that_finds_another_one_appending_goes_on(log: Log) -> None:
    log.start()
    log.gate.clear()
    first = threading.Thread(target=log.put, args=(0,))
    first.start()
    wait_until(lambda: log.appender.busy and not log.appender.waiting)
    tickets = [log.put(number)[0] for number in (1, 2, 3)]
    assert log.appender.waiting == 3
    log.gate.set()
    first.join(30)
    for ticket in tickets:
        ticket.wait(30)
    assert log.numbers() == [0, 1, 2, 3]


def test_large_batches_are_published_after_a_few_mebibytes(log: Log) -> None:
    size = 1 << 20
    tickets = [log.put(number, batch([b"x" * size]))[0] for number in range(12)]
    log.start()
    for ticket in tickets:
        ticket.wait(30)
    assert [number for group in log.groups for number in group] == list(range(12))
    assert max(len(group) for group in log.groups) <= GROUP_BYTES_MAX // size


def test_a_refused_put_does_not_hold_up_the_others(log: Log) -> None:
    log.refuse = {1: Rejected("no", field="f", limit=1), 2: ValueError("odd")}
    tickets = [log.put(number)[0] for number in range(4)]
    with pytest.raises(Rejected):
        tickets[1].wait(30)
    with pytest.raises(Bug):
        tickets[2].wait(30)
    assert log.numbers() == [0, 3]


def test_at_the_end_every_put_is_answered_with_nothing_stored(log: Log) -> None:
    waiting = [log.put(number, LARGE)[0] for number in range(3)]
    log.appender.end()
    late, _ = log.put(3)
    for ticket in [*waiting, late]:
        with pytest.raises(Unavailable):
            ticket.wait(30)
    assert log.appended == []
