"""Host, disk and versions of a benchmark: figures cannot be compared without them."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Mapping
from typing import Any

from raymq import __version__
from raymq.cluster.record.paths import mount_of
from raymq.store.base.files import Files

_GIB = 1 << 30
_PACKAGES = ("ray", "pyarrow", "numpy")


def machine(cluster: Mapping[str, object], files: Files | None = None) -> dict[str, Any]:
    """The machine that ran the benchmark. Args: `cluster`: the result of `Cluster.describe`."""
    return {
        "host": platform.node(),
        "system": f"{platform.system()} {platform.machine()}",
        "kernel": platform.release(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "disk": _disk(cluster, files or Files()),
    }


def versions() -> dict[str, str]:
    """The versions of the packages in use. A missing package is left out."""
    found = {name: version_of(name) for name in _PACKAGES}
    present = {name: version for name, version in found.items() if version is not None}
    return {"raymq": __version__, "python": platform.python_version(), **present}


def version_of(package: str) -> str | None:
    """The version of an installed package; None: it is missing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _disk(cluster: Mapping[str, Any], files: Files) -> str:
    """The disk of the data directory, in words."""
    data_dir = cluster.get("data_dir")
    if data_dir is None or not files.exists(data_dir):
        return "unknown: the data directory is on another machine"
    mount = mount_of(data_dir, files)
    usage = shutil.disk_usage(data_dir)
    return (
        f"{mount.kind} on {mount.device}, {usage.free / _GIB:,.0f} GiB free of "
        f"{usage.total / _GIB:,.0f} GiB ({data_dir})"
    )
