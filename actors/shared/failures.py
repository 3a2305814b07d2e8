"""Operations that fail and are tried again: each cause is logged once, and shown by status until they work."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from pathlib import Path
from typing import Any

from raymq.store.base.clock import Clock
from raymq.store.base.errors import RayMQError
from raymq.store.base.files import Files

logger = logging.getLogger("raymq.commit_log")


class ActiveFailures:
    """Cause of failure by part of a replica. Callers: any thread. A check costs nothing while there is none."""

    def __init__(self) -> None:
        #: part -> cause. The dict is replaced under the lock, never changed
        self._causes: dict[str, str] = {}
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._causes)

    def __contains__(self, part: str) -> bool:
        return part in self._causes

    def note(self, part: str, error: BaseException) -> None:
        """Note a failure of a part, which tries again."""
        cause = str(error) or repr(error)
        with self._lock:
            if self._causes.get(part) != cause:
                logger.warning("%s: %s; it is tried again", part, cause)
                self._causes = {**self._causes, part: cause}

    def clear(self, part: str) -> None:
        """Forget the failure of a part: it works again."""
        if not self._causes:
            return
        with self._lock:
            if part in self._causes:
                logger.warning("%s: works again", part)
                self._causes = {name: cause for name, cause in self._causes.items() if name != part}

    def as_status(self) -> dict[str, str]:
        """part -> cause."""
        return dict(self._causes)

    def __str__(self) -> str:
        return "; ".join(f"{part}: {cause}" for part, cause in self._causes.items())


#: a cause that lasts is written again after this time, and is out of date after three times as long
NOTE_PERIOD_MS = 10_000


class FailureFile:
    """A file with the reason why a follower gets no log bytes: text has no place in the control block.

    Nothing depends on it: it is not synced, and not written on a disk that refuses it.
    """

    def __init__(self, replica_dir: str | Path, *, files: Files, clock: Clock) -> None:
        self._path = Path(replica_dir) / "raymq" / "replication-trouble"
        self._files = files
        self._clock = clock
        self._written = ("", 0)

    def write(self, cause: str, *, damaged_at: int | None = None) -> None:
        """Write a cause for CommitLog; an empty one ends the one before. Callers: Replication, in each iteration.

        Args: `damaged_at`: the physical offset of log bytes that are damaged; None: that is not the cause.
        """
        written, written_ms = self._written
        if not cause and not written:
            return
        now_ms = self._clock.monotonic_ms()
        if cause == written and now_ms - written_ms < NOTE_PERIOD_MS:
            return

        self._written = (cause, now_ms)
        noted = {"monotonic_ms": now_ms, "cause": cause[:1000], "damaged_at": damaged_at}
        body = json.dumps(noted).encode()
        with (
            contextlib.suppress(OSError, RayMQError),
            self._files.opened(self._path, create=True) as fd,
        ):
            self._files.truncate(fd, 0)
            self._files.pwrite(fd, body, 0)

    def read(self) -> str | None:
        """The cause written last, or None when it is over or out of date."""
        return str(self._read().get("cause", "")) or None

    def damaged_at(self) -> int | None:
        """The physical offset of the damage that is the cause, or None when something else is, or nothing."""
        found = self._read().get("damaged_at")
        return found if isinstance(found, int) else None

    def _read(self) -> dict[str, object]:
        """What was written last; nothing when it is out of date."""
        try:
            found: dict[str, Any] = json.loads(self._files.read_file(self._path))
            age_ms = self._clock.monotonic_ms() - int(found["monotonic_ms"])
            return found if 0 <= age_ms < 3 * NOTE_PERIOD_MS else {}
        except (OSError, ValueError, KeyError, TypeError):
            return {}
