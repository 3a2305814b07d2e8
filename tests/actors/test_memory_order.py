"""Where stores are seen out of order, a barrier before each store puts them in order: on paper, and in our records."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest

from raymq.actors.shared import memory_order, ring
from raymq.actors.shared.control_block import (
    FILE_BYTES,
    ControlBlock,
    FollowerProgress,
    FollowerRecord,
    Leadership,
    Registration,
    RoleRecord,
)
from raymq.actors.shared.memory_order import OrderedWords, check_architecture, shared_words
from raymq.actors.shared.processes import ProcessIdentity
from raymq.store.base.errors import Bug, Rejected
from raymq.store.base.files import Files


def on(monkeypatch: pytest.MonkeyPatch, machine: str) -> None:
    """Let this machine be of another architecture."""
    other = os.uname_result((*os.uname()[:4], machine))
    monkeypatch.setattr(os, "uname", lambda: other)


# --- what a barrier does, on paper ----------------------------------------------------------------


class Access(NamedTuple):
    """One access of a program. A barrier stops both programs.

    "store_if" stores if all loads of its program saw 1. No core makes a store before the loads that decide about it.
    """

    kind: str
    word: str = ""


STORE_DATA, STORE_FIELD = Access("store", "data"), Access("store", "field")
LOAD_FIELD, LOAD_DATA = Access("load", "field"), Access("load", "data")
BARRIER = Access("barrier")


def outcomes(writer: Sequence[Access], reader: Sequence[Access]) -> set[tuple[int, ...]]:
    """What the loads of both may return, in the order of their programs, where cores reorder everything.

    Only a barrier orders: the writer's accesses before it are done, and the reader has a point, anywhere in its
    program, before which its accesses are done and after which none has begun.
    """
    if BARRIER in writer:
        at = writer.index(BARRIER)
        phases = [
            ([*writer[:at], *reader[:point]], [*writer[at + 1 :], *reader[point:]])
            for point in range(len(reader) + 1)
        ]
    else:
        phases = [([*writer, *reader], [])]

    found = set()
    for before, after in phases:
        for order in itertools.product(*map(itertools.permutations, (before, after))):
            memory = {"data": 0, "field": 0}
            seen = {}
            for access in itertools.chain(*order):
                if access.kind == "load":
                    seen[access] = memory[access.word]
                elif access.kind == "store" or all(seen.get(load) for load in loads_of(reader)):
                    memory[access.word] = 1
            found.add(tuple(seen[load] for load in loads_of([*writer, *reader])))
    return found


def loads_of(program: Sequence[Access]) -> list[Access]:
    """The loads of a program, in its order."""
    return [access for access in program if access.kind == "load"]


def test_who_sees_a_field_after_a_barrier_sees_the_data_before_it():
    seen = outcomes([STORE_DATA, BARRIER, STORE_FIELD], [LOAD_FIELD, LOAD_DATA])
    assert seen == {(0, 0), (0, 1), (1, 1)}


def test_without_the_barrier_the_field_may_be_seen_before_the_data():
    assert (1, 0) in outcomes([STORE_DATA, STORE_FIELD], [LOAD_FIELD, LOAD_DATA])


def test_a_barrier_after_both_stores_orders_nothing():
    assert (1, 0) in outcomes([STORE_DATA, STORE_FIELD, BARRIER], [LOAD_FIELD, LOAD_DATA])


def test_a_reader_that_loads_the_data_first_is_not_helped():
    assert (0, 1) in outcomes([STORE_DATA, BARRIER, STORE_FIELD], [LOAD_DATA, LOAD_FIELD])


TAKE = [LOAD_DATA, BARRIER, STORE_FIELD]
USE_AGAIN = [LOAD_FIELD, Access("store_if", "data")]


def test_who_says_after_a_barrier_that_an_entry_was_read_has_read_the_old_one():
    assert outcomes(TAKE, USE_AGAIN) == {(0, 0), (0, 1)}


def test_without_the_barrier_the_entry_may_be_read_after_it_was_used_again():
    assert (1, 1) in outcomes([LOAD_DATA, STORE_FIELD], USE_AGAIN)


# --- the records that processes read while others write them ---------------------------------------


class History:
    """Words that remember each state that they had."""

    def __init__(self, words: int) -> None:
        self.states = [[0] * words]

    def __getitem__(self, at: int | slice) -> int | Slice:
        return Slice(self, at.start) if isinstance(at, slice) else self.states[-1][at]

    def __setitem__(self, at: int, value: int) -> None:
        self.states.append([*self.states[-1]])
        self.states[-1][at] = int(value)


class Slice:
    """Some of the words, from `first` on."""

    def __init__(self, whole: History | Looks, first: int) -> None:
        self._whole = whole
        self._first = first

    def __getitem__(self, at: int) -> int:
        return self._whole[self._first + at]

    def __setitem__(self, at: int, value: int) -> None:
        self._whole[self._first + at] = value


class Looks:
    """The words as one reader sees them: each load sees the state of its own time."""

    def __init__(self, states: list[list[int]], times: Sequence[int]) -> None:
        self._states = states
        self._times = list(times)
        self.asked = 0

    def __getitem__(self, at: int | slice) -> int | Slice:
        if isinstance(at, slice):
            return Slice(self, at.start)
        self.asked += 1
        if self.asked > len(self._times):
            raise MoreLoads(at)
        return self._states[self._times[self.asked - 1]][at]

    def __setitem__(self, at: int, value: int) -> None:
        """A reader's own store, which no other reader of the test looks at."""


class MoreLoads(Exception):
    """The reader loads a word for which it has no time yet."""

    def __init__(self, at: int) -> None:
        super().__init__(at)
        self.at = at


def results(history: History, read: Callable[[Looks], object], *, in_order: bool) -> set[object]:
    """What a reader may find. Args: `in_order`: its loads see states in their order, as barriers make them."""
    found = set()
    waiting: list[tuple[int, ...]] = [()]
    while waiting:
        times = waiting.pop()
        try:
            found.add(read(Looks(history.states, times)))
        except MoreLoads as load:
            first = times[-1] if in_order and times else 0
            # The earliest time of each value: later loads may then see the most.
            earliest: dict[int, int] = {}
            for time in range(first, len(history.states)):
                earliest.setdefault(history.states[time][load.at], time)
            waiting += [(*times, time) for time in earliest.values()]
        except Bug:
            found.add(Bug)
    return found


def registrations() -> tuple[History, Callable[[Looks], object], set[object]]:
    history = History(FILE_BYTES // 8)
    written = [
        Registration(number, ProcessIdentity(number * 10, number * 100)) for number in (1, 2)
    ]
    for each in written:
        RoleRecord(history, "group_commit").register(each, 5)
    return history, lambda words: RoleRecord(words, "group_commit").registration(), {None, *written}


def leaderships() -> tuple[History, Callable[[Looks], object], set[object]]:
    history = History(FILE_BYTES // 8)
    written = [Leadership(number, number * 10, number * 100, number * 1000) for number in (1, 2)]
    for led in written:
        block_of(history).publish_leadership(led)
    return history, lambda words: block_of(words).leadership, {None, *written}


def block_of(words: History | Looks) -> ControlBlock:
    block = object.__new__(ControlBlock)
    block._words = words
    return block


def followers() -> tuple[History, Callable[[Looks], object], set[object]]:
    history = History(FILE_BYTES // 8)
    for number in (1, 2):
        FollowerRecord(history, 1).write(
            FollowerProgress(number, number * 10, 0, True, number * 10)
        )

    def read(words: Looks) -> object:
        found = FollowerRecord(words, 1).read()
        # The matched end is for statistics. It may be newer than the epoch.
        return (found.epoch, found.durable_end) if found.epoch else None

    return history, read, {None, (1, 10), (2, 20)}


def entries() -> tuple[History, Callable[[Looks], object], set[object]]:
    history = History(32)
    pushed = [(1, 10, 100), (2, 20, 200)]
    for entry in pushed:
        assert ring_of(history).push(entry)
    prefixes: set[object] = {tuple(pushed[:count]) for count in range(3)}
    return history, lambda words: tuple(ring_of(words).take_all()), prefixes


def ring_of(words: History | Looks) -> ring.Ring:
    return ring.Ring(words, pushed=0, taken=8, first=16)


RECORDS = [registrations, leaderships, followers, entries]


@pytest.mark.parametrize("record", RECORDS)
def test_a_record_is_read_whole_or_not_at_all_where_stores_are_seen_in_their_order(record):
    history, read, right = record()
    assert results(history, read, in_order=True) == right


@pytest.mark.parametrize("record", RECORDS)
def test_a_record_is_read_wrongly_where_stores_are_seen_in_any_order(record):
    history, read, right = record()
    assert results(history, read, in_order=False) - right


# --- the words themselves -------------------------------------------------------------------------


def test_each_store_follows_a_barrier_and_no_load_does():
    memory = memoryview(bytearray(64)).cast("q")
    before: list[list[int]] = []
    words = OrderedWords(memory, lambda: before.append(memory.tolist()))
    words[0] = 5
    words[4:][1] = True
    assert before == [[0] * 8, [5, *[0] * 7]]
    assert (words[0], words[5], len(words), words[4:].tolist()) == (5, 1, 8, [0, 1, 0, 0])
    assert len(before) == 2
    words.release()
    with pytest.raises(ValueError, match="released"):
        memory[0]


def test_on_x86_64_the_words_are_plain_memory(monkeypatch):
    on(monkeypatch, "x86_64")
    assert isinstance(shared_words(memoryview(bytearray(8))), memoryview)


def test_on_aarch64_each_store_calls_the_kernel(monkeypatch):
    on(monkeypatch, "aarch64")
    calls = []
    monkeypatch.setattr(memory_order, "_syscall", lambda: lambda *args: calls.append(args) or 6)
    monkeypatch.setattr(memory_order, "barrier_of", memory_order.barrier_of.__wrapped__)
    with pytest.raises(Rejected, match="refuses to register"):
        shared_words(memoryview(bytearray(8)))
    calls.clear()
    monkeypatch.setattr(
        memory_order, "_syscall", lambda: lambda *args: calls.append(args) or (args[1] == 0) * 6
    )
    words = shared_words(memoryview(bytearray(8)))
    assert calls == [(283, 0, 0, 0), (283, 4, 0, 0)]
    words[0] = 7
    assert calls[2:] == [(283, 2, 0, 0)]


def test_a_store_is_not_made_if_its_barrier_fails(monkeypatch):
    monkeypatch.setattr(
        memory_order, "_syscall", lambda: lambda number, command, *rest: -(command == 2)
    )
    words = OrderedWords(
        memoryview(bytearray(8)).cast("q"), memory_order.barrier_of.__wrapped__("aarch64")
    )
    with pytest.raises(Bug, match="membarrier"):
        words[0] = 7
    assert words[0] == 0


def test_the_kernel_of_this_machine_has_the_barrier(tmp_path):
    # The same code as on aarch64, with this architecture's number.
    barrier = memory_order.barrier_of(os.uname().machine)
    block = ControlBlock.open(str(tmp_path / "control"), files=Files())
    plain = block._words
    block._words = OrderedWords(plain, barrier)
    block.format(12345)
    block.begin(7, ProcessIdentity(1, 2), 100, 0)
    block.publish_appended(200)
    assert (block.valid(12345), block.appended, block.committed) == (True, 200, 200)
    block.close()


def test_every_store_into_the_files_of_a_replica_follows_a_barrier(monkeypatch, tmp_path):
    on(monkeypatch, "aarch64")
    barriers = []

    def call(number: int, command: int, *_: int) -> int:
        if command == 2:
            barriers.append(number)
        return 6 if command == 0 else 0

    monkeypatch.setattr(memory_order, "_syscall", lambda: call)
    monkeypatch.setattr(memory_order, "barrier_of", memory_order.barrier_of.__wrapped__)
    block = ControlBlock.open(str(tmp_path / "control"), files=Files())
    rings = ring.ReplicationRings.open(str(tmp_path / "ring"), files=Files())
    role, follower = block.roles["replication"], block.followers[1]
    me = Registration(77, ProcessIdentity(4242, 99))
    stores: list[tuple[int, Callable[[], object]]] = [
        (1, lambda: setattr(role, "heartbeat_ms", 5)),
        (5, lambda: role.register(me, 5)),
        (1, lambda: role.publish_position(3, 100)),
        (2, lambda: role.sync_latency.add(0.001)),
        (6, lambda: follower.write(FollowerProgress(2, 10, 5, True))),
        (2, lambda: block.publish_appended(100)),
        (11, lambda: block.publish_options({"flush_interval_ms": 5})),
        (4, lambda: rings.requests.push((1, 2, 3))),
        (1, rings.requests.take_all),
        (4, rings.reset),
    ]
    for count, store in stores:
        barriers.clear()
        store()
        assert len(barriers) == count
    assert (block.changed_options(), block.options_version) == ({"flush_interval_ms": 5}, 1)
    rings.close()
    block.close()


@pytest.mark.parametrize(("mask", "allowed"), [(-1, False), (2, False), (4, False), (6, True)])
def test_aarch64_needs_a_kernel_with_barriers(monkeypatch, mask, allowed):
    monkeypatch.setattr(memory_order, "_syscall", lambda: lambda *args: mask)
    if allowed:
        check_architecture("aarch64")
    else:
        with pytest.raises(Rejected, match="use Linux 4.16 or newer, and allow the call") as caught:
            check_architecture("aarch64")
        assert caught.value.field == "membarrier"


def test_another_architecture_is_refused(monkeypatch, tmp_path):
    on(monkeypatch, "riscv64")
    with pytest.raises(Rejected, match="order that riscv64 does not keep") as caught:
        ControlBlock.open(str(tmp_path / "control"), files=Files())
    assert not (tmp_path / "control").exists()
    assert (caught.value.field, caught.value.limit) == ("machine", "x86_64, aarch64")
