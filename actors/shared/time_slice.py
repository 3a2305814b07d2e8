"""Short time slices for threads that answer others.

Beside a program that computes, a woken thread waits for the end of that program's time slice: up to some milliseconds.
From Linux 6.12 on, a thread with a shorter slice runs at once. Its share of the core stays the same, in shorter turns.
Source: sched_setattr(2), `sched_runtime` of a thread that is not real-time.
"""

from __future__ import annotations

import ctypes
import platform
import struct

#: the shortest slice that the kernel takes, nanoseconds. The usual one on two cores has 1.4 ms
SLICE_NS = 100_000
#: `struct sched_attr`: size, policy, flags, nice, priority, slice, deadline, period
ATTRIBUTES = struct.Struct("=IIQiIQQQ")
#: the numbers of both calls; the C library has no functions for them before glibc 2.41
SCHED_SETATTR, SCHED_GETATTR = 314, 315
#: the policies that have a slice: SCHED_OTHER and SCHED_BATCH
_SLICED = (0, 3)
#: the flag SCHED_FLAG_RESET_ON_FORK
_NOT_INHERITED = 1


def shorten_time_slice(*, inherited: bool) -> bool:
    """Shorten the slices of the calling thread.

    A thread that computes is interrupted more often then. A real-time or idle thread is left as it is.

    Args: `inherited`: threads and processes that it starts have short slices, too. If it runs code of a user, they
    should not.
    Returns: whether the kernel took it. An older kernel does not.
    """
    if platform.machine() != "x86_64":
        return False
    call = ctypes.CDLL(None).syscall
    held = ctypes.create_string_buffer(ATTRIBUTES.size)
    if call(SCHED_GETATTR, 0, held, ATTRIBUTES.size, 0):
        return False
    size, policy, flags, nice, priority, *_ = ATTRIBUTES.unpack(held.raw)
    if policy not in _SLICED:
        return False

    if not inherited:
        flags |= _NOT_INHERITED
    asked = ATTRIBUTES.pack(size, policy, flags, nice, priority, SLICE_NS, 0, 0)
    if call(SCHED_SETATTR, 0, asked, 0) or call(SCHED_GETATTR, 0, held, ATTRIBUTES.size, 0):
        return False
    slice_ns: int = ATTRIBUTES.unpack(held.raw)[5]
    return slice_ns == SLICE_NS
