"""What does not work at present, and why: said once in the log, shown by status until it works again."""

from __future__ import annotations

import logging

log = logging.getLogger("raymq.commit_log")


class Troubles:
    """Causes by the part of a replica that has them. Callers: any thread; a look costs nothing while there are none."""

    def __init__(self) -> None:
        #: part -> cause; replaced, never changed
        self._causes: dict[str, str] = {}

    def __bool__(self) -> bool:
        return bool(self._causes)

    def __contains__(self, part: str) -> bool:
        return part in self._causes

    def note(self, part: str, error: BaseException) -> None:
        """A part failed and tries again."""
        cause = str(error) or repr(error)
        if self._causes.get(part) != cause:
            log.warning("%s: %s; it is tried again", part, cause)
            self._causes = {**self._causes, part: cause}

    def clear(self, part: str) -> None:
        """A part works."""
        if part in self._causes:
            log.warning("%s: works again", part)
            self._causes = {name: cause for name, cause in self._causes.items() if name != part}

    def as_status(self) -> dict[str, str]:
        """part -> cause."""
        return dict(self._causes)

    def __str__(self) -> str:
        return "; ".join(f"{part}: {cause}" for part, cause in self._causes.items())
