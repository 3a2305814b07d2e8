"""Removes the leftovers of stopped test runs when the next one begins.

pytest removes the directories of tests that passed, and nothing of a run that was killed. So each run writes its
process into its own directory, and the next run removes those whose process is gone. A directory whose marker cannot
be read, or names a process of another PID namespace, stays.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from raymq.cluster.deploy import process_tree
from raymq.cluster.deploy.owned_ray import stop_owned
from raymq.cluster.record.paths import ClusterPaths
from raymq.store.base.clock import Clock
from raymq.store.base.files import Files

_OWNER = ".raymq-owner"
#: a disk's directory in which every user may make another one
VAR_TMP = Path("/var/tmp")


def disk_root() -> Path:
    """Where tests make the directory of a cluster that is meant to last: it refuses /tmp, where pytest's own ones are.

    The home of this user, or /var/tmp for a user without a home that can be written.
    """
    home = Path(os.path.expanduser("~"))
    return home if home.is_dir() and os.access(home, os.W_OK | os.X_OK) else VAR_TMP


def claim(directory: Path) -> None:
    """This process uses the directory, until it ends."""
    pid = os.getpid()
    # A sweep may read the marker at any moment: it is there whole, or not at all.
    temporary = directory / f"{_OWNER}.{pid}"
    temporary.write_text(f"{_namespace()} {pid} {process_tree.start_time(pid, Files())}")
    os.replace(temporary, directory / _OWNER)


def sweep(roots: list[Path]) -> list[Path]:
    """Remove the directories in these whose process is gone, after the Rays that run on them. Returns: which."""
    removed = []
    for owner in [found for root in roots for found in root.glob(f"*/{_OWNER}")]:
        try:
            if not _is_left(owner.read_text()):
                continue
            for record in owner.parent.rglob("ray.json"):
                stop_owned(ClusterPaths(record.parent), files=Files(), clock=Clock())
        except FileNotFoundError:
            # Its own run, or the sweep of another one, removed the directory after it was listed.
            continue
        shutil.rmtree(owner.parent, ignore_errors=True)
        removed.append(owner.parent)
    return removed


def _is_left(marker: str) -> bool:
    """Whether the process that wrote the marker is gone; False if this process cannot know."""
    words = re.fullmatch(r"(pid:\[\d+\]) (\d+) (\d+)", marker)
    if words is None or words[1] != _namespace():
        return False
    return process_tree.start_time(int(words[2]), Files()) != int(words[3])


def _namespace() -> str:
    """The PID namespace of this process: a pid means nothing in another one."""
    return os.readlink("/proc/self/ns/pid")
