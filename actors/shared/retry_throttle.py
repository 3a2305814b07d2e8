"""Decides whether to try an optimisation that helps only at times: less and less often while it does not help."""

from __future__ import annotations

#: after failures the next 1, 2, 4 ... occasions are skipped, up to this number
PAUSE_MAX = 32


class RetryThrottle:
    """Callers: any thread may ask, one at a time records."""

    def __init__(self) -> None:
        #: occasions to skip from now on, and after the next failure
        self._pause = 0
        self._next_pause = 1

    def should_try(self) -> bool:
        """Whether to try on this occasion. Ask once per occasion."""
        # Two threads that ask at once may take two off.
        if self._pause > 0:
            self._pause -= 1
            return False
        return True

    def note_result(self, *, worked: bool) -> None:
        """Skip more occasions after a failure, none after a success."""
        if worked:
            self._next_pause = 1
        else:
            self._pause = self._next_pause
            self._next_pause = min(2 * self._next_pause, PAUSE_MAX)
