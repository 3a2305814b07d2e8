"""Progress of a long walk over a store: bars with `rich` on a terminal, else a line every few seconds."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from typing import IO, Any

#: a walk shorter than this shows nothing
_QUIET_S = 1.0
#: least time between two lines without a terminal
_LINE_S = 5.0


class StoreProgress:
    """A context manager whose `report` is the progress callback of the walks in store/."""

    def __init__(self, stream: IO[str], *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._monotonic = monotonic
        self._began = self._printed = monotonic()
        self._bars: Any = None
        self._tasks: dict[str, Any] = {}
        self._rich = stream.isatty() and importlib.util.find_spec("rich") is not None

    def __enter__(self) -> StoreProgress:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def report(self, walk: str, done: int, total: int) -> None:
        """Show `done` of `total` bytes of one walk."""
        now_s = self._monotonic()
        if now_s - self._began < _QUIET_S:
            return
        if self._rich:
            self._draw(walk, done, total)
        elif now_s - self._printed >= _LINE_S:
            self._printed = now_s
            print(f"{walk}: {100 * done // max(total, 1)} %", file=self._stream, flush=True)

    def _draw(self, walk: str, done: int, total: int) -> None:
        if self._bars is None:
            from rich.console import Console
            from rich.progress import Progress

            self._bars = Progress(console=Console(file=self._stream), transient=True)
            self._bars.start()
        if walk not in self._tasks:
            self._tasks[walk] = self._bars.add_task(walk, total=total)
        self._bars.update(self._tasks[walk], completed=done, total=total)
