"""The request and status rings between CommitLog and a satellite."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from raymq.actors.ring import CAPACITY, FLAG_ANSWER, Request, RoleRings, Status
from raymq.store.errors import Bug
from raymq.store.files import Files
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[2]


def request(sequence: int) -> Request:
    return Request(sequence, 1000 + sequence, 5_000 + sequence, FLAG_ANSWER)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "ring-group_commit")


@pytest.fixture
def rings(path: str) -> Iterator[RoleRings]:
    opened = RoleRings.open(path, files=Files())
    yield opened
    opened.close()


def test_requests_come_out_whole_and_in_order(rings: RoleRings, path: str):
    other = RoleRings.open(path, files=Files())
    sent = [request(number) for number in range(10)]
    assert all(rings.request(entry) for entry in sent)
    assert other.take_requests() == sent
    assert other.take_requests() == []
    other.close()


def test_requests_and_statuses_do_not_mix(rings: RoleRings):
    rings.request(request(1))
    rings.answer(Status(7, 1))
    assert rings.take_statuses() == [Status(7, 1)]
    assert rings.take_requests() == [request(1)]


def test_a_full_ring_refuses_and_keeps_what_it_has(rings: RoleRings):
    for number in range(CAPACITY):
        assert not rings.full
        assert rings.request(request(number))
    assert rings.full
    assert not rings.request(request(CAPACITY))
    assert rings.take_requests() == [request(number) for number in range(CAPACITY)]
    assert rings.request(request(CAPACITY))
    assert rings.take_requests() == [request(CAPACITY)]


def test_the_ring_goes_around_many_times(rings: RoleRings):
    sent = 0
    while sent < 3 * CAPACITY:
        batch = [request(number) for number in range(sent, sent + 1000)]
        for entry in batch:
            assert rings.request(entry)
        assert rings.take_requests() == batch
        sent += 1000


def test_a_new_satellite_goes_on_where_the_dead_one_stopped(rings: RoleRings, path: str):
    dead = RoleRings.open(path, files=Files())
    rings.request(request(1))
    assert dead.take_requests() == [request(1)]
    rings.request(request(2))
    dead.close()
    successor = RoleRings.open(path, files=Files())
    assert successor.take_requests() == [request(2)]
    successor.close()


def test_reset_empties_both(rings: RoleRings):
    rings.request(request(1))
    rings.answer(Status(1, 1))
    rings.reset()
    assert rings.take_requests() == []
    assert rings.take_statuses() == []


def test_impossible_counts_are_a_bug(path: str):
    with RoleFile(path) as words:
        words[8] = 5
        rings = RoleRings.open(path, files=Files())
        with pytest.raises(Bug):
            rings.take_requests()
        rings.close()


class RoleFile:
    """The words of a ring file, as another process would scribble on them."""

    def __init__(self, path: str) -> None:
        self._rings = RoleRings.open(path, files=Files())

    def __enter__(self) -> memoryview:
        return self._rings._words

    def __exit__(self, *_: object) -> None:
        self._rings.close()


PRODUCER = """
import sys
from raymq.actors.ring import Request, RoleRings
from raymq.store.files import Files
rings = RoleRings.open(sys.argv[1], files=Files())
number = 0
while number < 50_000:
    if rings.request(Request(number, 3 * number, 5 * number, 7 * number)):
        number += 1
"""


def test_another_process_fills_it_while_we_take(rings: RoleRings, path: str):
    producer = subprocess.Popen([sys.executable, "-c", PRODUCER, path], cwd=ROOT)
    taken: list[Request] = []
    until(lambda: len(taken) >= 50_000, lambda: taken.extend(rings.take_requests()))
    assert producer.wait(30) == 0
    assert taken == [Request(n, 3 * n, 5 * n, 7 * n) for n in range(50_000)]
