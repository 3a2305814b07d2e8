"""Network namespaces: may this process make them?"""

from __future__ import annotations

import contextlib
import secrets
import subprocess


def ip(*words: str) -> None:
    """The command `ip`. Raises: RuntimeError with what it says; FileNotFoundError."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")


def can_make_namespaces() -> bool:
    """Whether two of them can be joined by a pair of virtual cards: tried, and undone."""
    mark = f"rq{secrets.token_hex(3)}"
    with contextlib.ExitStack() as undo:
        try:
            ip("netns", "add", mark)
            undo.callback(ip, "netns", "del", mark)
            ip("-n", mark, "link", "add", f"{mark}a", "type", "veth", "peer", "name", f"{mark}b")
        except (RuntimeError, FileNotFoundError):
            return False
    return True
