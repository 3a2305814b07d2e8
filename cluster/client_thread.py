"""The threads of clients, which differ from those of the program. No Ray."""

from __future__ import annotations

import threading
from collections.abc import Callable


class ClientThread(threading.Thread):
    """A thread of a client, which no exit of the process waits for.

    Its target catches BaseException: no caller sees an error of the thread, and its sends or reads would never end.
    """

    def __init__(self, target: Callable[[], object], name: str) -> None:
        super().__init__(target=target, name=name, daemon=True)


def in_client_thread() -> bool:
    """Whether the running thread is a client's, so that no code of the program sees what it raises."""
    return isinstance(threading.current_thread(), ClientThread)
