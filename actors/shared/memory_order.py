"""The order in which the processes of a replica see each other's stores: 8-byte words in memory that they map.

Every protocol in shared memory needs two things. If a process sees one store, it sees those that the same process made
before it. And a store becomes visible only after the loads that its process made before it. x86_64 promises both.
aarch64 promises neither, and Python has no acquire and release between processes.

There each store is preceded by a barrier that the kernel runs on every core on which a registered process runs
(`membarrier`). So one side pays for both, and loads stay plain. Why that is enough: docs/decisions/0033-aarch64.md.
Each store costs a system call: a few microseconds. Neither architecture orders a store before a later load of another
word. Nothing here relies on it.

Source: membarrier(2), MEMBARRIER_CMD_GLOBAL_EXPEDITED, since Linux 4.16.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable

from raymq.store.base.errors import Rejected, broken

#: stores are seen in their order, and loads happen in theirs
ORDERED = ("x86_64",)
#: ordered by barriers. Function was tried under emulation, order on no hardware yet
EXPERIMENTAL = ("aarch64",)
#: the number of membarrier(2) on each; the C library has no function for it
MEMBARRIER = {"x86_64": 324, "aarch64": 283}
#: its commands. The first returns a mask of those that the kernel has
QUERY, GLOBAL_EXPEDITED, REGISTER_GLOBAL_EXPEDITED = 0, 1 << 1, 1 << 2


class OrderedWords:
    """Words whose stores other registered processes see in their order, on any architecture.

    It is used like a `memoryview` of format "q".
    """

    def __init__(self, words: memoryview, barrier: Callable[[], object]) -> None:
        """Args: `barrier`: called before each store."""
        self._words = words
        self._barrier = barrier

    def __getitem__(self, at: int | slice) -> int | OrderedWords:
        found = self._words[at]
        return OrderedWords(found, self._barrier) if isinstance(found, memoryview) else found

    def __setitem__(self, at: int, value: int) -> None:
        self._barrier()
        self._words[at] = value

    def __len__(self) -> int:
        return len(self._words)

    def tolist(self) -> list[int]:
        """The values, read one after the other."""
        return [self._words[at] for at in range(len(self._words))]

    def release(self) -> None:
        """Release the memory."""
        self._words.release()


def shared_words(view: memoryview) -> memoryview:
    """The words of shared memory. On x86_64 these are plain words without a cost.

    Raises: Rejected if this architecture's order is unknown, or its kernel refuses barriers.
    """
    words = view.cast("q")
    machine = os.uname().machine
    if machine in ORDERED:
        return words
    check_architecture(machine)
    # It has the methods that are used. Loads of plain words must not pay for a common base class.
    return OrderedWords(words, barrier_of(machine))  # type: ignore[return-value]


def check_architecture(machine: str) -> None:
    """Check that the processes of a replica may share memory on this machine. Args: `machine`: of `os.uname()`.

    Raises: Rejected if a word may be seen before the data that it is about.
    """
    if machine in ORDERED:
        return
    if machine not in EXPERIMENTAL:
        known = ", ".join((*ORDERED, *EXPERIMENTAL))
        raise Rejected(
            f"the processes of a replica share memory in an order that {machine} does not keep; run the shards on "
            f"{known} (clients may be elsewhere)",
            field="machine",
            limit=known,
            found=machine,
        )

    needed = GLOBAL_EXPEDITED | REGISTER_GLOBAL_EXPEDITED
    held = _membarrier(machine, QUERY)
    # -1: the call is refused. As a mask it would have every command.
    if held < 0 or held & needed != needed:
        raise Rejected(
            f"the processes of a replica share memory, and on {machine} they need membarrier(2), which this kernel "
            "or its sandbox refuses; use Linux 4.16 or newer, and allow the call in the container's seccomp profile",
            field="membarrier",
            found=machine,
        )


def experimental(machine: str) -> str | None:
    """What to know about an experimental architecture; None for the others. Args: `machine`: of `os.uname()`."""
    if machine not in EXPERIMENTAL:
        return None
    return f"RayMQ on {machine} is experimental: it was tried under emulation, and on no such hardware yet"


@functools.cache
def barrier_of(machine: str) -> Callable[[], None]:
    """The barrier of this architecture. This process is registered, so that it receives those of others.

    Callers: before the first load of shared memory. Raises: Rejected if the kernel refuses.
    """
    if _membarrier(machine, REGISTER_GLOBAL_EXPEDITED):
        raise Rejected(
            f"the kernel refuses to register this process for membarrier(2): {os.strerror(ctypes.get_errno())}; allow "
            "the call in the container's seccomp profile",
            field="membarrier",
            found=machine,
        )
    call, number = _syscall(), MEMBARRIER[machine]

    def barrier() -> None:
        if call(number, GLOBAL_EXPEDITED, 0, 0):
            raise broken("membarrier(2) fails", errno=ctypes.get_errno())

    return barrier


def _membarrier(machine: str, command: int) -> int:
    result: int = _syscall()(MEMBARRIER[machine], command, 0, 0)
    return result


@functools.cache
def _syscall() -> Callable[..., int]:
    # PyDLL keeps the interpreter's lock: the call takes less time than a thread needs to come back.
    call = ctypes.PyDLL(None, use_errno=True).syscall
    call.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_uint, ctypes.c_int)
    call.restype = ctypes.c_long
    return call
