"""The rings between CommitLog and Replication."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from raymq.actors.shared.ring import CAPACITY, ReplicationRings, RingEntry
from raymq.store.base.errors import Bug
from raymq.store.base.files import Files
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[2]


def request(number: int) -> RingEntry:
    return (number, 1000 + number, 5_000 + number)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "ring-replication")


@pytest.fixture
def rings(path: str) -> Iterator[ReplicationRings]:
    opened = ReplicationRings.open(path, files=Files())
    yield opened
    opened.close()


def test_requests_come_out_whole_and_in_order(rings: ReplicationRings, path: str):
    other = ReplicationRings.open(path, files=Files())
    sent = [request(number) for number in range(10)]
    assert all(rings.requests.push(entry) for entry in sent)
    assert other.requests.take_all() == sent
    assert other.requests.take_all() == []
    other.close()


def test_requests_and_late_puts_do_not_mix(rings: ReplicationRings):
    rings.requests.push(request(1))
    rings.late.push((7, 100, 1))
    assert rings.late.take_all() == [(7, 100, 1)]
    assert rings.requests.take_all() == [request(1)]


def test_a_full_ring_refuses_and_keeps_what_it_has(rings: ReplicationRings):
    for number in range(CAPACITY):
        assert rings.requests.push(request(number))
    assert not rings.requests.push(request(CAPACITY))
    assert rings.requests.take_all() == [request(number) for number in range(CAPACITY)]
    assert rings.requests.push(request(CAPACITY))
    assert rings.requests.take_all() == [request(CAPACITY)]


def test_the_ring_goes_around_many_times(rings: ReplicationRings):
    sent = 0
    while sent < 3 * CAPACITY:
        batch = [request(number) for number in range(sent, sent + 1000)]
        for entry in batch:
            assert rings.requests.push(entry)
        assert rings.requests.take_all() == batch
        sent += 1000


def test_a_new_satellite_goes_on_where_the_dead_one_stopped(rings: ReplicationRings, path: str):
    dead = ReplicationRings.open(path, files=Files())
    rings.requests.push(request(1))
    assert dead.requests.take_all() == [request(1)]
    rings.requests.push(request(2))
    dead.close()
    successor = ReplicationRings.open(path, files=Files())
    assert successor.requests.take_all() == [request(2)]
    successor.close()


def test_reset_empties_both(rings: ReplicationRings):
    rings.requests.push(request(1))
    rings.late.push((1, 1, 1))
    rings.reset()
    assert rings.requests.take_all() == []
    assert rings.late.take_all() == []


def test_impossible_counts_are_a_bug(path: str):
    with RoleFile(path) as words:
        words[8] = 5
        rings = ReplicationRings.open(path, files=Files())
        with pytest.raises(Bug):
            rings.requests.take_all()
        rings.close()


class RoleFile:
    """The words of a ring file, as another process could overwrite them."""

    def __init__(self, path: str) -> None:
        self._rings = ReplicationRings.open(path, files=Files())

    def __enter__(self) -> memoryview:
        return self._rings._words

    def __exit__(self, *_: object) -> None:
        self._rings.close()


PRODUCER = """
import sys
from raymq.actors.shared.ring import ReplicationRings
from raymq.store.base.files import Files
rings = ReplicationRings.open(sys.argv[1], files=Files())
number = 0
while number < 50_000:
    if rings.requests.push((number, 3 * number, 5 * number)):
        number += 1
"""


def test_one_process_pushes_while_another_takes(rings: ReplicationRings, path: str):
    producer = subprocess.Popen([sys.executable, "-c", PRODUCER, path], cwd=ROOT)
    taken: list[RingEntry] = []
    until(lambda: len(taken) >= 50_000, lambda: taken.extend(rings.requests.take_all()))
    assert producer.wait(30) == 0
    assert taken == [(n, 3 * n, 5 * n) for n in range(50_000)]
