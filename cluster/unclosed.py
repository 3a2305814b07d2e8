"""The warning about a client that its program dropped without closing it. No Ray."""

from __future__ import annotations

import warnings


def warn_unclosed(client: object, name: str, advice: str) -> None:
    """Warn as Python does about unclosed files: `python -X dev` shows the warning and where `client` was made."""
    warnings.warn(f"unclosed {name}: {advice}", ResourceWarning, stacklevel=3, source=client)
