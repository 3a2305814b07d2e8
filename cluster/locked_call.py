"""What a `start` and a `stop` have in common."""

from __future__ import annotations

import logging

from raymq.store.base.clock import Clock
from raymq.store.base.files import Files

from .deploy.ray_host import Progress
from .record.paths import ClusterPaths

logger = logging.getLogger("raymq")


class LockedCall:
    """State of one `start` or `stop` call: the locked directory and the deadline."""

    def __init__(
        self, paths: ClusterPaths, files: Files, timeout_s: float, progress: Progress | None
    ) -> None:
        self._paths = paths
        self._files = files
        self._clock = Clock()
        self._timeout_s = timeout_s
        self._deadline = self._clock.monotonic_ms() + int(timeout_s * 1000)
        self._report = progress or logger.info
        self._warn = progress or logger.warning
