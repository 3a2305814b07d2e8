"""What test runs that were stopped left behind: it goes when the next one begins.

pytest removes the directories of tests that passed, and nothing of a run that was killed. So each run writes its
process into its own directory, and the next run removes those whose process is gone.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from raymq.cluster.deploy import process_tree
from raymq.cluster.deploy.owned_ray import stop_owned
from raymq.cluster.paths import ClusterPaths
from raymq.store.clock import Clock
from raymq.store.files import Files

_OWNER = ".raymq-run"


def claim(place: Path) -> None:
    """This process uses the directory, until it ends."""
    (place / _OWNER).write_text(f"{os.getpid()} {process_tree.start_time(os.getpid(), Files())}")


def sweep(roots: list[Path]) -> list[Path]:
    """Remove the directories in these whose process is gone, after the Rays that run on them. Returns: which."""
    removed = []
    for owner in [found for root in roots for found in root.glob(f"*/{_OWNER}")]:
        words = re.fullmatch(r"(\d+) (\d+)", owner.read_text())
        if words and process_tree.start_time(int(words[1]), Files()) == int(words[2]):
            continue
        for record in owner.parent.rglob("ray.json"):
            stop_owned(ClusterPaths(record.parent), files=Files(), clock=Clock())
        shutil.rmtree(owner.parent, ignore_errors=True)
        removed.append(owner.parent)
    return removed
