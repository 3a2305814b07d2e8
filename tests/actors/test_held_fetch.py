"""A fetch that is held looks when it must, and at nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pyarrow as pa
import pytest

from raymq.actors.api.held_fetch import (
    IN_VAIN_MS,
    LOOK_AGAIN_MS,
    LOOK_MS,
    LOOKED_UNITS_MAX,
    HeldFetch,
)
from raymq.store.base.errors import Unavailable
from raymq.store.queues import reader
from raymq.store.records.requests import FetchRequest, FetchSlice
from raymq.store.state.topics import QueueKey
from tests.support.clock import ManualClock

ASKED = FetchRequest("t", {0: 5, 1: 7}, 1 << 20, 10, 9_000)


def part(queue_id: int, first: int, following: int, records: int = 0) -> FetchSlice:
    column = pa.array([b"record"] * records, pa.binary())
    return FetchSlice(queue_id, first, following, 0, 100, column, None)


class Answers:
    """A shard that gives these answers, one for each look, and then none."""

    def __init__(self, *answers: list[FetchSlice]) -> None:
        self.answers = list(answers)
        #: of each look
        self.offsets: list[dict[int, int]] = []
        self.held: set[Callable[[], None]] = set()
        #: whether it was held at each look
        self.was_held: list[bool] = []
        #: called after each look
        self.after: Callable[[], None] = lambda: None

    def fetch(self, request: FetchRequest) -> list[FetchSlice]:
        assert request.wait_ms == 0
        self.offsets.append(dict(request.offsets))
        self.was_held.append(bool(self.held))
        found = self.answers.pop(0) if self.answers else []
        self.after()
        return found

    def hold(self, queues: Iterable[QueueKey], notify: Callable[[], None]) -> Callable[[], None]:
        assert set(queues) == {("t", 0), ("t", 1)}
        self.held.add(notify)
        return lambda: self.held.remove(notify)


def begin(shard: Answers, clock: ManualClock, asked: FetchRequest = ASKED) -> HeldFetch:
    backend: Any = shard
    return HeldFetch(backend, asked, clock, lambda: None)


def test_it_is_held_before_the_first_look_so_that_no_message_comes_between() -> None:
    shard = Answers([part(0, 5, 8, records=3)])
    with begin(shard, ManualClock()) as held:
        assert held.poll() == [part(0, 5, 8, records=3)]
        assert shard.held
    assert shard.was_held == [True]
    assert not shard.held


def test_a_fetch_that_may_not_wait_holds_nothing() -> None:
    shard = Answers()
    with begin(shard, ManualClock(), ASKED._replace(wait_ms=0)) as held:
        assert held.poll() == []
    assert shard.was_held == [False]


def test_it_looks_again_only_when_it_is_asked_and_ends_at_its_time() -> None:
    shard, clock = Answers(), ManualClock()
    with begin(shard, clock) as held:
        assert held.poll() is None
        assert held.left_ms() == 9_000
        clock.advance(8_999)
        assert held.left_ms() == 1
        assert held.poll() is None
        clock.advance(1)
        assert held.left_ms() == 0
        assert held.poll() == []
    assert len(shard.offsets) == 3


def test_a_reader_of_any_replica_looks_again_from_time_to_time() -> None:
    shard, clock = Answers(), ManualClock()
    with begin(shard, clock, ASKED._replace(seen_epoch=3)) as held:
        assert held.poll() is None
        assert held.left_ms() == LOOK_AGAIN_MS
        clock.advance(8_900)
        assert held.poll() is None
        assert held.left_ms() == 100


def test_it_goes_on_after_what_was_looked_at_in_vain_and_says_so_in_the_end() -> None:
    shard, clock = Answers([part(0, 5, 6)], [part(0, 6, 9)], []), ManualClock()
    with begin(shard, clock) as held:
        # Between two looks the server sees whether the client has left.
        assert (held.poll(), held.left_ms()) == (None, 0)
        assert (held.poll(), held.left_ms()) == (None, 0)
        assert (held.poll(), held.left_ms()) == (None, IN_VAIN_MS)
        assert [looked[0] for looked in shard.offsets] == [5, 6, 9]
        shard.answers.append([part(1, 7, 8, records=1)])
        answer = held.poll()
    assert answer == [part(0, 5, 9), part(1, 7, 8, records=1)]


def test_a_filter_that_matches_nothing_ends_before_another_look_could_be_too_much() -> None:
    units = reader.FILTERED_UNITS
    looks = [[part(0, at, at + units)] for at in range(0, 9 * units, units)]
    shard, clock = Answers(*looks), ManualClock()
    with begin(shard, clock, ASKED._replace(offsets={0: 0, 1: 7})) as held:
        answers = [held.poll() for _ in range(LOOKED_UNITS_MAX // units)]
    assert answers == [*[None] * 3, [part(0, 0, LOOKED_UNITS_MAX)]]

    shard = Answers([part(0, 5, 6)], [part(0, 6, 7)], [part(0, 7, 8)])
    shard.after = lambda: clock.advance(LOOK_MS)
    with begin(shard, clock) as held:
        assert held.poll() is None
        # Two looks took 40 ms, and a third one might take 20.
        assert held.poll() == [part(0, 5, 7)]


def test_soon_after_a_look_in_vain_the_reader_learns_how_far_it_is() -> None:
    shard, clock = Answers([], [part(0, 5, 6)], [part(0, 6, 7)]), ManualClock()
    with begin(shard, clock) as held:
        assert held.poll() is None
        # Nothing to look at: the fetch is held.
        clock.advance(1000)
        assert held.poll() is None
        clock.advance(IN_VAIN_MS - 1)
        assert held.poll() is None
        clock.advance(1)
        assert held.left_ms() == 0
        assert held.poll() == [part(0, 5, 7)]


def test_a_slow_look_ends_the_fetch_once_its_time_is_up() -> None:
    clock = ManualClock()
    shard = Answers()
    # The dispatch lags: a look takes seconds, however short its wait.
    shard.after = lambda: clock.advance(5_000)
    with begin(shard, clock) as held:
        assert held.poll() is None
        assert held.poll() == []


def test_the_refusal_of_a_replica_with_another_role_ends_the_hold() -> None:
    shard, clock = Answers(), ManualClock()

    def refuse() -> None:
        raise Unavailable("it does not lead")

    with begin(shard, clock) as held:
        assert held.poll() is None
        shard.after = refuse
        with pytest.raises(Unavailable):
            held.poll()
    assert not shard.held
