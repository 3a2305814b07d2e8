"""Workloads of a store of which every single call of the disk is made to fail, and what must hold then.

A host drives each: it syncs and confirms groups of puts, stops at the first failed sync, and continues after a refusal.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import NamedTuple

from raymq.store.base.errors import Corrupt, DeliveryUnknown, RayMQError
from raymq.store.config.store_config import StoreConfig
from raymq.store.engine.message_store import MessageStore
from tests.support.batches import request
from tests.support.confirming import confirm, dispatch_all
from tests.support.crash_states import last_states
from tests.support.crash_traces import (
    CONFIG,
    POOLED,
    SEED,
    WITH_MEMORY,
    fixed_names,
    open_store,
)
from tests.support.simulated_disk import SimulatedDisk

#: methods of `Files` that may fail, and how
FAULTS: dict[str, tuple[int, ...]] = {
    "pwrite": (errno.EIO, errno.ENOSPC),
    "allocate": (errno.EIO, errno.ENOSPC),
    "truncate": (errno.EIO, errno.ENOSPC),
    "open_file": (errno.EIO, errno.EMFILE),
    "sync": (errno.EIO, errno.ENOSPC),
    "sync_data": (errno.EIO, errno.ENOSPC),
    "sync_dir": (errno.EIO,),
    "make_dir": (errno.EIO, errno.ENOSPC),
    "make_dirs": (errno.EIO, errno.ENOSPC),
    "rename": (errno.EIO,),
    "unlink": (errno.EIO,),
}
#: rows of the largest put
BATCH_ROWS = 5
#: disks of a power loss at the end that are checked
LOST = 3
Expected = (RayMQError, OSError)


class Host:
    """Drives one store on a disk, and remembers the answers."""

    def __init__(self, disk: SimulatedDisk, config: StoreConfig = CONFIG) -> None:
        self.disk = disk
        self.config = config
        #: None: it did not open, or was closed
        self.store: MessageStore | None = None

        self.acked: list[bytes] = []
        #: appended and not yet synced
        self.open_bodies: list[bytes] = []
        #: their outcome is unknown
        self.unknown: list[bytes] = []
        self.refused: list[bytes] = []
        #: name -> number, as `Owed.facts`
        self.facts: dict[str, int] = {}
        self.errors: list[Exception] = []

        #: the log was cut, or was to be cut
        self.cut = False
        #: the store could not take back an append, and said that it stopped writing
        self.stopped = False
        #: what fails fails only once
        self.once = False
        #: pieces of work ahead of the tail
        self.prewritten = 0
        self._number = 0

    def open(self) -> None:
        try:
            with fixed_names():
                self.store = open_store(self.disk, self.config)
        except Expected as error:
            self.errors.append(error)

    def topic(self) -> None:
        self.change_state("topic t", 1, lambda store: store.topics.create("t", 1, [0]))

    def put(self, rows: int, size: int) -> None:
        """Put rows that differ in their first bytes."""
        bodies = []
        for _ in range(rows):
            self._number += 1
            bodies.append((b"%04d:" % self._number).ljust(size, b"."))

        if self.store is None:
            return

        try:
            self.store.put(request([*bodies]))
        except DeliveryUnknown as error:
            self.errors.append(error)
            self.unknown += bodies
        except Expected as error:
            self.errors.append(error)
            self.refused += bodies
            self.stopped = self.store.log.health.poisoned is not None
        else:
            self.open_bodies += bodies

    def change_state(self, name: str, number: int, do: Callable[[MessageStore], object]) -> None:
        """Make something a fact of the state, once it is synced. An epoch brings its own number."""
        if self.store is None:
            return
        try:
            made = do(self.store)
            if isinstance(made, tuple) and name == "epoch":
                number = made[0]
        except Expected as error:
            self.errors.append(error)
            return
        if self.ack():
            self.facts[name] = number

    def ack(self) -> bool:
        """Sync and confirm. A host whose sync fails puts nothing more. Returns: whether it was synced."""
        store = self.store
        if store is None or store.log.health.poisoned is not None:
            return False

        try:
            store.log.commit_pool()
            store.log.sync()
        except Expected as error:
            self.errors.append(error)
            return False

        self.acked += self.open_bodies
        self.open_bodies = []
        store.log.note_confirmed(store.log.synced)

        try:
            dispatch_all(store)
        except Expected as error:
            # A consume queue found no room: it is tried again.
            self.errors.append(error)
        return True

    def do(self, step: Callable[[MessageStore], object]) -> None:
        """One step of the store that may fail."""
        if self.store is None:
            return
        try:
            step(self.store)
        except Expected as error:
            self.errors.append(error)

    def prewrite(self) -> None:
        """Let the worker ahead of the tail do what there is to do, as its thread does beside the puts."""
        if self.store is None:
            return
        allocator = self.store.log.allocator
        while allocator.step():
            self.prewritten += 1
        if allocator.last_error is not None:
            self.errors.append(allocator.last_error)

    def close(self) -> None:
        self.do(lambda store: store.close())
        self.store = None


# --- workloads: what comes before the faults, and what they meet ----------------------------------


def ready(host: Host) -> None:
    host.open()
    host.topic()


def some_puts(host: Host) -> None:
    ready(host)
    for _ in range(3):
        host.put(2, 300)
    host.ack()


def first_start(host: Host) -> None:
    ready(host)
    host.put(1, 100)
    host.ack()


def puts(host: Host) -> None:
    for turn in range(9):
        host.put(1, 400)
        host.ack()
        if turn % 4 == 3:
            host.do(lambda store: store.sync_queues())


def prewrites(host: Host) -> None:
    """Zeros are written and synced ahead of the tail between the puts, over two rolls."""
    for turn in range(10):
        host.put(2, 900)
        host.prewrite()
        host.ack()
        host.prewrite()
        assert turn or host.errors or host.prewritten, "nothing was written allocator"


def batches_over_a_roll(host: Host) -> None:
    for _ in range(5):
        host.put(BATCH_ROWS, 900)
        host.ack()


def close(host: Host) -> None:
    host.put(2, 300)
    host.close()


def unclean(host: Host) -> None:
    """A disk after a power loss: synced records, and a torn tail."""
    some_puts(host)
    host.put(2, 700)
    _, lost = last_states(host.disk, 12, SEED)
    host.disk, host.store = lost[-1].recording(), None
    host.unknown, host.open_bodies = host.open_bodies, []


def recovery(host: Host) -> None:
    host.open()
    host.put(1, 100)
    host.ack()


def a_tail(host: Host) -> None:
    some_puts(host)
    host.put(3, 900)
    assert host.store is not None
    host.store.log.commit_pool()


def truncation(host: Host) -> None:
    assert host.store is not None
    # Cut bytes were never confirmed. They may stay if the cut failed.
    host.cut = True
    host.do(lambda store: store.log.truncate(store.log.confirmed))


def administration(host: Host) -> None:
    for turn in range(3):
        host.change_state(
            f"topic t{turn}", 1, lambda s, turn=turn: s.topics.create(f"t{turn}", 1, [0])
        )
        host.change_state(
            "offset", turn, lambda s, turn=turn: s.commit_offsets("g", "t", {0: turn})
        )
        host.change_state("epoch", turn, lambda s: s.inner_put.init_producer(5))
        host.put(1, 1800)
        host.ack()


def pooled_puts(host: Host) -> None:
    for turn in range(6):
        host.put(2, 900)
        if turn == 1:
            host.do(lambda store: store.log.pool.publish(7))
        host.ack()
    host.close()


class Workload(NamedTuple):
    """`before` meets no fault."""

    before: Callable[[Host], None]
    work: Callable[[Host], None]
    config: StoreConfig = CONFIG


def nothing(host: Host) -> None:
    """An empty disk."""


WORKLOADS: dict[str, Workload] = {
    "first start": Workload(nothing, first_start),
    "puts": Workload(ready, puts),
    "prewrites": Workload(ready, prewrites),
    "batches over a roll": Workload(ready, batches_over_a_roll),
    "close": Workload(some_puts, close),
    "recovery": Workload(unclean, recovery),
    "truncation": Workload(a_tail, truncation),
    "administration": Workload(ready, administration),
    "transient pool": Workload(ready, pooled_puts, POOLED),
}


# --- every call fails -----------------------------------------------------------------------------


class Failed(NamedTuple):
    """The outcome of one workload, whichever call failed."""

    #: kind -> calls of it
    calls: dict[str, int]
    injections: int
    #: runs after which the store refused to write
    poisoned: int
    #: runs in which a put was refused or unknown
    refused: int
    seconds: float


class Outcome(NamedTuple):
    """All that the check of a disk depends on."""

    boot: int
    disk_key: int
    acked: tuple[bytes, ...]
    #: bodies that may be there or not
    open_bodies: frozenset[bytes]
    facts: frozenset[tuple[str, int]]
    may_be_poisoned: bool
    may_be_refused: bool


def fail_every_call(name: str) -> Failed:
    """Run a workload once for every call that it makes of the disk, which fails once, and for ever.

    Raises: AssertionError with kind, number and error of the call.
    """
    started = time.perf_counter()
    undisturbed = _run(name, None, 0, 0, forever=False)
    assert not undisturbed.errors, undisturbed.errors
    start = _prepared(name).disk.calls
    # `unclean` continues with a disk that was made from the trace of another.
    calls = {kind: undisturbed.disk.calls[kind] - start[kind] for kind in FAULTS}

    injections = poisoned = refused = 0
    checked: set[Outcome] = set()
    for kind, count in calls.items():
        for error in FAULTS[kind]:
            for forever in (False, True):
                for at in range(1, count + 1):
                    context = (
                        f"{name}: {kind} {at} of {count}, {errno.errorcode[error]}"
                        f"{', for ever' if forever else ''}"
                    )
                    injections += 1
                    try:
                        host = _run(name, kind, at, error, forever=forever)
                        host.disk.heal()
                        assert host.errors or kind in (
                            "unlink",
                            "open_file",
                            "sync_dir",
                            "truncate",
                        )
                        poisoned += (
                            host.store is not None and host.store.log.health.poisoned is not None
                        )
                        refused += bool(host.refused)
                        _check(host, checked)
                    except Exception as found:
                        found.args = (f"{context}: {found}",)
                        raise

    return Failed(calls, injections, poisoned, refused, time.perf_counter() - started)


def _prepared(name: str) -> Host:
    workload = WORKLOADS[name]
    host = Host(SimulatedDisk(base=WITH_MEMORY), workload.config)
    workload.before(host)
    assert not host.errors, host.errors
    return host


def _run(name: str, kind: str | None, at: int, error: int, *, forever: bool) -> Host:
    host = _prepared(name)
    if kind is not None:
        host.once = not forever
        host.disk.fail(kind, at=at, error=error, forever=forever)
    WORKLOADS[name].work(host)
    return host


def _check(host: Host, checked: set[Outcome]) -> None:
    """Check the rules after any single fault: in the store that met it, and in the disk that is left when it dies.

    Many faults leave the same disk and the same promise. Each such pair is opened once: those in `checked` were.
    """
    _no_second_sync(host.disk)
    store = host.store
    if store is not None and store.log.health.may_take_back:
        _check_left(host, checked)
        _go_on(host, store)

    if host.once and store is not None and store.log.health.poisoned is None:
        assert len(host.refused) <= BATCH_ROWS, "more than the one put was refused"

    if store is not None and store.log.health.poisoned is not None:
        try:
            store.put(request([b"after a failed sync"]))
        except RayMQError:
            pass
        else:
            raise AssertionError("a store that stopped writing took a put")

    _check_left(host, checked)


def _go_on(host: Host, store: MessageStore) -> None:
    """The disk works again, and a store that could not take back an append takes puts again."""
    # A consume queue that found no room is tried again.
    dispatch_all(store)
    host.topic()
    refused = len(host.refused)
    host.put(1, 40)
    assert host.ack(), "a store whose disk works again syncs nothing"
    assert len(host.refused) == refused, "a store whose disk works again takes no put"
    host.stopped = False


def _check_left(host: Host, checked: set[Outcome]) -> None:
    """Check the disk that is left when the store dies now."""
    killed, lost = last_states(host.disk, LOST, SEED)
    for power, image in ((False, killed), *((True, image) for image in lost)):
        outcome = _outcome(host, image)
        if outcome in checked:
            continue
        checked.add(outcome)
        try:
            opened = open_store(image, host.config)
        except Corrupt as refusal:
            poisoned = refusal.fields.get("rule") == "poisoned" and outcome.may_be_poisoned
            if not poisoned and not outcome.may_be_refused:
                raise
            continue
        _check_opened(opened, host, power=power)
        opened.close()


def _outcome(host: Host, image: SimulatedDisk) -> Outcome:
    return Outcome(
        image.boot,
        image.key,
        tuple(host.acked),
        frozenset([*host.open_bodies, *host.unknown]),
        frozenset(host.facts.items()),
        may_be_poisoned=host.cut or _a_sync_failed(host.disk),
        may_be_refused=host.stopped and not host.once,
    )


def _check_opened(store: MessageStore, host: Host, *, power: bool) -> None:
    store.log.commit_pool()
    confirm(store)
    found = _bodies(store)
    acked = set(host.acked)

    assert [body for body in found if body in acked] == host.acked, "an acknowledged record is lost"
    known = {*host.acked, *host.open_bodies, *host.unknown}
    assert set(found) <= known, "a record that was refused, or never put"
    assert len(found) == len(set(found)), "a record is there twice"

    state = store.state
    for name, number in host.facts.items():
        if name.startswith("topic "):
            assert name[6:] in state.topics, f"{name} is lost"
        elif name == "offset":
            assert state.offsets["g", "t"][0] >= number
        else:
            assert (state.producers.epoch(5) or 0) >= number

    if "t" in state.topics:
        assert store.put(request([b"next"])).first_offset == len(found)


def _bodies(store: MessageStore) -> list[bytes]:
    found: list[bytes] = []
    high = store.queue_range("t", 0)[1]
    at = 0
    while at < high:
        part = store.fetch("t", 0, at, max_bytes=1 << 20, max_records=1000)
        assert part.records is not None
        for raw in part.records.to_pylist():
            length = int.from_bytes(raw[84:88], "big")
            found.append(raw[88 : 88 + length])
        at = part.next_offset
    return found


def _no_second_sync(disk: SimulatedDisk) -> None:
    """But for `meta`, whose next update writes a whole slot, and counts only when that was synced."""
    meta = disk.number_of("/s/raymq/meta")
    failed: set[int] = set()
    for op in disk.snapshot():
        if op.kind == "sync_failed":
            failed.add(op.node)
        elif op.kind == "sync" and op.node != meta:
            assert op.node not in failed, "a second sync of a file after a failed one"


def _a_sync_failed(disk: SimulatedDisk) -> bool:
    return any(op.kind == "sync_failed" for op in disk.snapshot())
