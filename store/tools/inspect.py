"""Read a store directory without changing it: `verify` names every fault, `dump` prints every message.

Import this name. read_only opens and walks; verify_queues, _chain, _index and _files compare.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from raymq.store.base.errors import Corrupt, RayMQError
from raymq.store.base.files import Files
from raymq.store.tools.verify_compaction import check_compaction

from .dump import dump
from .faults import Fault, Faults, Report, ReportProgress, from_error
from .read_only import ReadOnlyStore
from .verify_chain import check_chain
from .verify_files import (
    check_checkpoint,
    check_config,
    check_marks,
    check_strays,
    check_timer,
)
from .verify_index import IndexCheck
from .verify_queues import QueueCheck

__all__ = ["Fault", "Faults", "Report", "check", "check_derived", "dump", "verify"]


def check(root: Path, files: Files | None = None, progress: ReportProgress | None = None) -> Report:
    """Every fault of a store, and the decision of a start about its log's end.

    Raises: Rejected if `root` is not a store. Changes nothing.
    """
    try:
        store = ReadOnlyStore(root, files, progress)
    except Corrupt as error:
        return Report([from_error(root, error)], None)
    try:
        store.scan()
        check_derived(store)
    except RayMQError as error:
        store.faults.error(error)
    finally:
        store.close()
    return Report(store.faults.all(), store.verdict, store.faults.rebuilt_at_start)


def check_derived(store: ReadOnlyStore) -> int:
    """Compare everything that can be made from the log with the log. Callers: after `scan`.

    Returns: the end of the last record that any consume queue knows, -1 without one.
    """
    queues = QueueCheck(store)
    checks: tuple[Callable[[], None], ...] = (
        partial(check_strays, store),
        queues.run,
        partial(check_chain, store),
        IndexCheck(store).run,
        partial(check_checkpoint, store),
        partial(check_marks, store),
        partial(check_config, store),
        partial(check_timer, store),
        partial(check_compaction, store),
    )
    for step in checks:
        try:
            step()
        except OSError as error:
            # The other parts are checked nevertheless.
            store.faults.os_error(error)
    return queues.known


def verify(root: Path, files: Files | None = None) -> list[Fault]:
    """Every fault of a store: file, offset, rule. A torn tail that a start cuts is not a fault.

    Raises: Rejected if `root` is not a store. Changes nothing.
    """
    return check(root, files).faults
