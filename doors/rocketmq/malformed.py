"""The error of every codec here for bytes that a peer should not have sent."""

from __future__ import annotations


class Malformed(ValueError):
    """A peer sent bytes that the protocol does not allow, or more of them than a limit. The text names the limit."""
