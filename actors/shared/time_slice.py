"""Short time slices for threads that answer others.

Beside a program that computes, a woken thread waits for the end of that program's time slice: up to some milliseconds.
From Linux 6.12 on, a thread with a shorter slice need not wait, as long as it has used no more than its share of the
core. Its share stays the same, in shorter turns.
Source: the member `sched_runtime` of sched_setattr(2), Linux 857b158dc5e8 ("sched/eevdf: Use sched_attr::sched_runtime
to set request/slice suggestion").
"""

from __future__ import annotations

import ctypes
import os
import struct

#: the shortest slice that the kernel takes, nanoseconds. The usual one is 1.4 ms on two cores with Linux 6.18
SLICE_NS = 100_000
#: `struct sched_attr`: size, policy, flags, nice, priority, slice, deadline, period
ATTRIBUTES = struct.Struct("=IIQiIQQQ")
#: the numbers of sched_setattr and sched_getattr; the C library has no functions for them before glibc 2.41
CALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}
#: the policies that have a slice: SCHED_OTHER and SCHED_BATCH
_SLICED = (0, 3)


def shorten_time_slice() -> bool:
    """Shorten the slices of the calling thread, and of the threads that it starts.

    With short slices a thread that computes is interrupted more often.

    Returns: whether the thread has short slices now. The kernel may be too old, or a sandbox may refuse the call. A
    real-time or idle thread is left as it is.
    """
    system = os.uname()
    if system.sysname != "Linux" or system.machine not in CALLS:
        return False
    set_attributes, get_attributes = CALLS[system.machine]
    call = ctypes.CDLL(None).syscall
    held = ctypes.create_string_buffer(ATTRIBUTES.size)
    if call(get_attributes, 0, held, ATTRIBUTES.size, 0):
        return False
    size, policy, flags, nice, priority, usual_ns, *_ = ATTRIBUTES.unpack(held.raw)
    # Before 6.12 the slice is 0.
    if policy not in _SLICED or not usual_ns:
        return False

    asked = ATTRIBUTES.pack(size, policy, flags, nice, priority, SLICE_NS, 0, 0)
    if call(set_attributes, 0, asked, 0) or call(get_attributes, 0, held, ATTRIBUTES.size, 0):
        return False
    slice_ns: int = ATTRIBUTES.unpack(held.raw)[5]
    return slice_ns == SLICE_NS
