"""The threads of clients, which differ from those of the program. No Ray."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from raymq.store.base.errors import Rejected

#: longest wait of a `close` for a thread. One that connects to a silent shard notices the end up to 24 s later
JOIN_S = 2.0

#: packages that replace threads: the module and the function that say so, the name of threads there, and the remedy
_PATCHES = (
    ("gevent.monkey", "is_module_patched", "threading", "gevent.monkey.patch_all(thread=False)"),
    ("eventlet.patcher", "is_monkey_patched", "thread", "eventlet.monkey_patch(thread=False)"),
)


class ClientThread(threading.Thread):
    """A thread of a client, which no exit of the process waits for.

    Its target catches BaseException: no caller sees an error of the thread, and its sends or reads would never end.
    """

    def __init__(self, target: Callable[[], object], name: str) -> None:
        super().__init__(target=target, name=name, daemon=True)


def join_at_close(thread: threading.Thread, transport: str) -> None:
    """Wait for a thread that was made to end, if it does so soon.

    With Ray the wait has no limit: a process that leaves Ray during a call of the thread would die.
    """
    thread.join(None if transport == "ray" else JOIN_S)


def in_client_thread() -> bool:
    """Whether the running thread is a client's, so that no code of the program sees what it raises."""
    return isinstance(threading.current_thread(), ClientThread)


def check_real_threads() -> None:
    """Raises: Rejected if gevent or eventlet has replaced the threads of this process. Imports neither.

    The first call of gRPC that waits would stop all greenlets, also the one that it waits for.
    """
    for module, function, threads, remedy in _PATCHES:
        is_patched = getattr(sys.modules.get(module), function, None)
        if is_patched is not None and is_patched(threads):
            package = module.partition(".")[0]
            raise Rejected(
                f"{package} has replaced the threads of this process, in which the first send would freeze: call "
                f"{remedy} instead, or use RayMQ in a process that {package} does not patch (with gunicorn: "
                "--worker-class gthread)",
                field="threads",
                limit="threads of the operating system",
            )
