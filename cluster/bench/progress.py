"""The progress of a benchmark: a live table with `rich`, else one line per second."""

from __future__ import annotations

import importlib.util
import time
from typing import IO, Any

from .run import Round, Watcher

#: how often per second the live table is drawn
_DRAWN_HZ = 4
#: seconds between two merges of the workers' reports
_MERGED_S = 0.5


def watcher(stream: IO[str]) -> Watcher:
    """The live table on a terminal if `rich` is installed (extra `bench`), else plain lines."""
    if stream.isatty() and importlib.util.find_spec("rich") is not None:
        return LiveWatcher(stream)
    return LineWatcher(stream)


def figures(round_: Round) -> list[list[str]]:
    """One row per channel: name, messages/s and MB/s of the last full tick, percentiles so far."""
    rows = []
    for name, series in sorted(round_.series.items()):
        ticks = sorted(series.points)
        # The newest one is still being filled by some workers.
        last = ticks[-2] if len(ticks) > 1 else ticks[-1]
        tick, width = series.points[last], series.width_s(last)
        latency = series.latency
        values = latency.percentiles((50.0, 99.0, 99.9, 100.0))
        times = [f"{value / 1000:,.2f}" if latency.max else "-" for value in values]
        rate, mb_per_s = tick.messages / width, tick.payload_bytes / width / 1e6
        rows.append([name, f"{rate:,.0f}", f"{mb_per_s:,.1f}", *times])
    return rows


_HEADINGS = ("", "messages/s", "MB/s", "p50 ms", "p99 ms", "p99.9 ms", "max ms")


class LineWatcher(Watcher):
    """Plain lines, at most one per second and channel."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._printed = 0.0

    def phase(self, text: str, seconds: float | None) -> None:
        """See Watcher."""
        about = "" if seconds is None else f" ({seconds:g} s)"
        print(f"{text}{about}", file=self._stream, flush=True)
        self._printed = time.monotonic()

    def figures(self, round_: Round) -> None:
        """See Watcher."""
        if time.monotonic() - self._printed < 1.0:
            return
        self._printed = time.monotonic()
        for row in figures(round_):
            words = [f"{row[0]}:", f"{row[1]} messages/s,", f"{row[2]} MB/s;"]
            words += [
                f"{name.removesuffix(' ms')} {value}"
                for name, value in zip(_HEADINGS[3:], row[3:], strict=True)
            ]
            print(f"  {' '.join(words)} ms", file=self._stream, flush=True)


class LiveWatcher(Watcher):
    """A table that is redrawn in place."""

    def __init__(self, stream: IO[str]) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=stream)
        self._live = Live(console=self._console, refresh_per_second=_DRAWN_HZ, transient=True)
        self._text = ""
        self._seconds: float | None = None
        self._began = self._merged = 0.0

    def phase(self, text: str, seconds: float | None) -> None:
        """See Watcher."""
        self._console.print(f"[bold]{text}[/]")
        self._text, self._seconds = text, seconds
        self._began = self._merged = time.monotonic()
        self._live.start()
        self._live.update(self._table([]))

    def figures(self, round_: Round) -> None:
        """See Watcher."""
        if time.monotonic() - self._merged < _MERGED_S:
            return
        self._merged = time.monotonic()
        self._live.update(self._table(figures(round_)))

    def done(self) -> None:
        """See Watcher."""
        self._live.stop()

    def _table(self, rows: list[list[str]]) -> Any:
        from rich.table import Table

        past = time.monotonic() - self._began
        total = "" if self._seconds is None else f" of {self._seconds:g}"
        table = Table(title=f"{self._text}: {past:.0f}{total} s", title_justify="left")
        for heading in _HEADINGS:
            table.add_column(heading, justify="right" if heading else "left")
        for row in rows:
            table.add_row(*row)
        return table
