"""The clusters that a user names: by a data directory, by a name, or as the only one of this machine."""

from __future__ import annotations

import os

from raymq.store.base.errors import Rejected
from raymq.store.base.files import Files

from . import cluster_record
from .paths import ClusterPaths


def local_paths(target: str | os.PathLike[str] | None, files: Files) -> ClusterPaths:
    """The data directory on this machine that `target` (a directory, a name, None) names.

    Raises: Rejected when there is none.
    """
    text = None if target is None else os.fspath(target)
    if text is not None and "://" in text:
        message = (
            f"{text} is an address. Run this command on the machine with the data directory, and pass that directory "
            "or the cluster's name"
        )
        raise Rejected(message, field="target", limit="a data directory or name")
    data_dir = find_data_dir(text, files)
    if data_dir is not None:
        return ClusterPaths(data_dir)
    if text is None:
        raise Rejected("no cluster is known here: name its data directory", field="target")
    message = f"{text!r} is neither a data directory nor a cluster started here; known: {known_names(files)}"
    raise Rejected(message, field="target")


def is_path(target: str | None, files: Files) -> bool:
    """Whether a target is a data directory, not a name."""
    return target is not None and (os.sep in target or files.exists(ClusterPaths(target).cluster))


def find_data_dir(target: str | None, files: Files) -> str | None:
    """The directory that a path or a known name means; None: no such cluster is known here.

    Raises: Rejected when `target` is None and several clusters are known.
    """
    if is_path(target, files):
        return target
    known = cluster_record.known_clusters(files)
    if target is not None:
        return known.get(target)
    if len(known) > 1 and "default" not in known:
        message = f"several clusters are known here ({', '.join(sorted(known))}): say which one"
        raise Rejected(message, field="target")
    return known.get("default") or next(iter(known.values()), None)


def known_names(files: Files) -> str:
    return ", ".join(sorted(cluster_record.known_clusters(files))) or "none"
