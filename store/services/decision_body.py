"""A decision on a write as the body of its record."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

#: of the JSON of a decision: its record holds less, compressed
DECISION_TEXT_BYTES_MAX = 64 << 20


def body_of(decision: Mapping[str, object]) -> bytes:
    """A decision as the body of its record. Its ranges have much in common, and take an eighth of their JSON."""
    return zlib.compress(json.dumps(decision, separators=(",", ":")).encode())


def decision_of(body: bytes) -> dict[str, object]:
    """The decision that a record's body holds. Raises: ValueError; zlib.error."""
    text = body
    # The first decisions were not compressed.
    if not body.startswith(b"{"):
        inflater = zlib.decompressobj()
        text = inflater.decompress(body, DECISION_TEXT_BYTES_MAX)
        if inflater.unconsumed_tail:
            raise ValueError(f"a decision has more than {DECISION_TEXT_BYTES_MAX} bytes")
    found: dict[str, Any] = json.loads(text)
    return found
