"""What does not work at present, and why: said once in the log, shown by status until it works again."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from pathlib import Path

from raymq.store.clock import Clock
from raymq.store.errors import RayMQError
from raymq.store.files import Files

log = logging.getLogger("raymq.commit_log")


class Troubles:
    """Causes by the part of a replica that has them. Callers: any thread; a look costs nothing while there are none."""

    def __init__(self) -> None:
        #: part -> cause; replaced under the lock, never changed
        self._causes: dict[str, str] = {}
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._causes)

    def __contains__(self, part: str) -> bool:
        return part in self._causes

    def note(self, part: str, error: BaseException) -> None:
        """A part failed and tries again."""
        cause = str(error) or repr(error)
        with self._lock:
            if self._causes.get(part) != cause:
                log.warning("%s: %s; it is tried again", part, cause)
                self._causes = {**self._causes, part: cause}

    def clear(self, part: str) -> None:
        """A part works."""
        if not self._causes:
            return
        with self._lock:
            if part in self._causes:
                log.warning("%s: works again", part)
                self._causes = {name: cause for name, cause in self._causes.items() if name != part}

    def as_status(self) -> dict[str, str]:
        """part -> cause."""
        return dict(self._causes)

    def __str__(self) -> str:
        return "; ".join(f"{part}: {cause}" for part, cause in self._causes.items())


#: a cause that lasts is written again after so long, and counts no longer than three times of it
NOTE_PERIOD_MS = 10_000


class TroubleNote:
    """A file through which Replication tells CommitLog why it does not get on: text has no place in the control block.

    Nothing depends on it: it is neither synced nor written on a disk that refuses it.
    """

    def __init__(self, replica_dir: str | Path, *, files: Files, clock: Clock) -> None:
        self._path = Path(replica_dir) / "raymq" / "replication-trouble"
        self._files = files
        self._clock = clock
        self._told = ("", 0)

    def tell(self, cause: str) -> None:
        """Callers: Replication, in each round; empty: all is well at present."""
        if not cause:
            return
        now_ms = self._clock.monotonic_ms()
        told, told_ms = self._told
        if cause == told and now_ms - told_ms < NOTE_PERIOD_MS:
            return
        self._told = (cause, now_ms)
        body = json.dumps({"monotonic_ms": now_ms, "cause": cause[:1000]}).encode()
        with contextlib.suppress(OSError, RayMQError):
            fd = self._files.open_file(self._path, create=True)
            try:
                self._files.truncate(fd, 0)
                self._files.pwrite(fd, body, 0)
            finally:
                self._files.close(fd)

    def read(self) -> str | None:
        """The cause that was told last, if that is not long ago."""
        try:
            found = json.loads(self._files.read_file(self._path))
            age_ms = self._clock.monotonic_ms() - int(found["monotonic_ms"])
            return str(found["cause"]) if 0 <= age_ms < 3 * NOTE_PERIOD_MS else None
        except (OSError, ValueError, KeyError, TypeError):
            return None
