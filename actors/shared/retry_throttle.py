"""Something that pays only now and then, tried ever less often while it does not."""

from __future__ import annotations

#: after tries in vain the next 1, 2, 4 ... times are left out, at most so many
PAUSE_MAX = 32


class RetryThrottle:
    """Whether to try once more. Callers: any thread may ask; one at a time tells how a try went."""

    def __init__(self) -> None:
        #: times that are left out from now on, and after the next try in vain
        self._pause = 0
        self._next_pause = 1

    def should_try(self) -> bool:
        """Whether to try this time; asked once each time."""
        # Two that ask at once may take two off.
        if self._pause > 0:
            self._pause -= 1
            return False
        return True

    def record(self, *, worked: bool) -> None:
        """How a try went."""
        if worked:
            self._next_pause = 1
        else:
            self._pause = self._next_pause
            self._next_pause = min(2 * self._next_pause, PAUSE_MAX)
