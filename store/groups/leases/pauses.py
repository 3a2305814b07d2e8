"""Why the workers of a group get nothing. Its own module: the command line shows it, and loads no columns."""

from __future__ import annotations

#: why a group is paused: more of its messages died within a minute than its options allow; an operator wants it so
DEAD_LETTERS, OPERATOR = "dead letters", "operator"
#: by their number in metrics; empty: no pause
PAUSES = ("", DEAD_LETTERS, OPERATOR)


def pause_text(reason: str) -> str:
    """How a pause is shown. Operators know what they want."""
    return "paused" if reason == OPERATOR else f"paused: {reason}"
