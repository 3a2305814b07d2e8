"""A load beside the measurement: `--busy` of a benchmark."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
from collections.abc import Iterator

#: the title of a table that was measured so
BUSY_TITLE = "busy: beside the measurement, one process per core computed all the time"


def option(parser: argparse.ArgumentParser) -> None:
    """Add `--busy`."""
    parser.add_argument("--busy", action="store_true", help="with a load on every core")


@contextlib.contextmanager
def load(busy: bool) -> Iterator[None]:
    """A process on every core that computes all the time, if `busy`."""
    count = len(os.sched_getaffinity(0)) if busy else 0
    processes = [multiprocessing.Process(target=_compute, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def _compute() -> None:
    while True:
        sum(range(10_000))
