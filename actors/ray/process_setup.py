"""Settings of an actor's process, made before its work begins."""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
from collections.abc import Mapping

from raymq.store.base.errors import Rejected

#: the variable with the level of RayMQ's loggers in the processes of a cluster
LOG_LEVEL = "RAYMQ_LOG_LEVEL"
#: an actor may start several threads at once
_log_level_lock = threading.Lock()
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")

#: glibc's numbers of these options, and the bytes that one arena may keep
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
KEEP_BYTES = 16 << 20


def keep_freed_memory() -> None:
    """Let malloc keep the memory of large batches: once returned, it costs a page fault per 4 KiB of the next batch.

    Measured: 30 faults per batch of 1 MiB instead of 235, a third less CPU, 20 MB more memory. With one arena per
    thread it is 110 faults, because glibc returns an arena as soon as it is empty. So a Ray that RayMQ starts has one
    arena (`MALLOC_ARENA_MAX`, cluster/deploy/owned_ray.py). Without glibc this does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, KEEP_BYTES)
        mallopt(_M_TRIM_THRESHOLD, KEEP_BYTES)


def check_log_level(environment: Mapping[str, str]) -> str | None:
    """The level that LOG_LEVEL asks for; None: Python's own, WARNING. Raises: Rejected for another word."""
    level = environment.get(LOG_LEVEL, "").upper()
    if level and level not in _LEVELS:
        message = (
            f"{LOG_LEVEL}={environment[LOG_LEVEL]}: use one of {', '.join(_LEVELS)}, or unset it"
        )
        raise Rejected(message, field=LOG_LEVEL, limit=", ".join(_LEVELS), found=level)
    return level or None


def set_log_level(environment: Mapping[str, str]) -> None:
    """Let RayMQ's loggers write what LOG_LEVEL asks for, with its time. A second call does nothing.

    Nor does one for another word than a level.
    """
    try:
        level = check_log_level(environment)
    except Rejected:
        # `start` has refused it. A process that Ray begins again must serve.
        return
    root = logging.getLogger("raymq")
    with _log_level_lock:
        if level is None or root.handlers:
            return
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        root.setLevel(level)
        root.addHandler(handler)
        root.propagate = False


class _NoPandas:
    """An import finder that finds no pandas."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("pandas is not searched here", name=name)


def keep_pandas_out() -> None:
    """Keep Arrow from importing pandas, which it does for its first array of Python objects.

    Measured: 40 MB and 0.2 s of every start, for nothing. Arrow tries once. The process may import pandas later.
    """
    import pyarrow as pa

    finder = _NoPandas()
    sys.meta_path.insert(0, finder)
    try:
        pa.array([0])
    finally:
        sys.meta_path.remove(finder)
