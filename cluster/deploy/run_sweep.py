"""Removes the files of dead processes from /tmp/raymq-<uid>: wakeup sockets, queue sockets, sessions of Ray.

A SIGKILL leaves socket files, and a replica's directory stays for the next start. A connection attempt shows whether a
process listens on a socket. That also holds for containers that share /tmp and do not see each other's processes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import stat
from collections.abc import Iterable
from pathlib import Path

from raymq.actors.shared.wakeup import wakeup_directory
from raymq.cluster.record.paths import run_dir
from raymq.store.base.clock import Clock
from raymq.store.base.errors import RayMQError
from raymq.store.base.files import Files

from .process_tree import mark_of

#: a younger entry may be about to be used
_YOUNG_MS = 60_000
_WAKEUPS = re.compile(r"[0-9a-f]{12}")
_QUEUE_SOCKET = re.compile(r"queue-[0-9a-f]+")
_SESSION = re.compile(r"ray-([0-9a-f]{8})")


def sweep(files: Files, clock: Clock, closed: Iterable[Path] = ()) -> list[str]:
    """Remove the files that no living process owns.

    Args: `closed`: replicas that have just been closed. Their entries are removed even when young.
    Returns: the names removed. An entry that cannot be removed stays for the next time.
    """
    directory = run_dir(files)
    closed_names = {Path(wakeup_directory(str(replica))).name for replica in closed}
    marks: set[str] | None = None
    removed = []

    for name in sorted(files.list(directory)):
        path = directory / name
        session = _SESSION.fullmatch(name)
        if not (session or _WAKEUPS.fullmatch(name) or _QUEUE_SOCKET.fullmatch(name)):
            continue

        with contextlib.suppress(OSError, RayMQError):
            age_ms = clock.now_ms() - int(os.lstat(path).st_mtime * 1000)
            if name not in closed_names and age_ms < _YOUNG_MS:
                continue

            if session:
                marks = _living_marks(files) if marks is None else marks
                if session[1] in marks:
                    continue
            if any(map(_listens, _sockets(path))):
                continue
            if stat.S_ISDIR(os.lstat(path).st_mode):
                files.remove_tree(path)
            else:
                files.unlink(path)
            removed.append(name)

    return removed


def _living_marks(files: Files) -> set[str]:
    """The first letters of the marks of all owned Rays that have a process, as in their directories' names."""
    pids = filter(str.isdigit, os.listdir("/proc"))
    return {mark_of(int(pid), files)[:8] for pid in pids}


def _sockets(path: Path) -> list[Path]:
    """The sockets at or below a path, which for a session of Ray belong to its servers."""
    return [each for each in (path, *path.rglob("*")) if each.is_socket()]


def _listens(path: Path) -> bool:
    for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM):
        with socket.socket(socket.AF_UNIX, kind) as probe:
            probe.setblocking(False)
            try:
                probe.connect(str(path))
            except (ConnectionRefusedError, FileNotFoundError):
                continue
            except OSError as error:
                # EPROTOTYPE: a socket of the other kind. Any other error (EAGAIN: a full queue) shows a listener.
                if error.errno == errno.EPROTOTYPE:
                    continue
            return True
    return False
