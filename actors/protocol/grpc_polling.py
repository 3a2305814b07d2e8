"""Lets the thread that waits for a message read the socket itself.

The gRPC of pyarrow 22 and later leaves sockets to threads of its own, its event engine. Each message then wakes two
threads on each side instead of one. An exchange of 1 KiB takes 257 us with the event engine, and 255 us of CPU in both
processes. Without it the exchange takes 150 us, and 170 us of CPU (two cores, medians of 4,000, pyarrow 26). Older
versions have no event engine at these places.
"""

from __future__ import annotations

import functools
import os

import pyarrow as pa
import pyarrow.flight as flight

#: gRPC's own variable. A program that sets it keeps its choice
VARIABLE = "GRPC_EXPERIMENTS"
WITHOUT_EVENT_ENGINE = "-event_engine_client,-event_engine_listener"
#: gRPC reports names that it does not know on stderr
PYARROW_MIN = 22


@functools.cache
def read_in_waiting_threads() -> None:
    """Switch the event engine off for this process. It has no effect if the process has used Flight before.

    Callers: before a Flight client or server is made.

    gRPC reads the variable once, when it is first used. The variable is removed after that, because programs that this
    process starts, such as Ray, have a gRPC of another version.
    """
    if VARIABLE in os.environ or int(pa.__version__.partition(".")[0]) < PYARROW_MIN:
        return
    os.environ[VARIABLE] = WITHOUT_EVENT_ENGINE
    try:
        # It does not connect before its first call.
        flight.FlightClient("grpc://127.0.0.1:1").close()
    finally:
        del os.environ[VARIABLE]
