"""Producer ids that names make."""

from __future__ import annotations

import hashlib


def hashed(text: str) -> int:
    """64 bits of a hash."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
