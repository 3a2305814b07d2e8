"""The Grafana dashboard: a file of this package, and where Ray's Grafana looks for it.

A Ray that runs with its dashboard writes a Grafana configuration into its session directory (`metrics/grafana`). That
names the folder from which Grafana takes dashboards. The operator runs Prometheus and Grafana, as for Ray's own
dashboards.
"""

from __future__ import annotations

import importlib.resources
import os
from pathlib import Path
from types import ModuleType

from raymq.cluster.deploy.ray_host import RayTarget, find_ray, session
from raymq.cluster.record.targets import local_paths
from raymq.store.base.errors import Rejected
from raymq.store.base.files import Files

#: its name in Grafana's folder
FILE_NAME = "raymq_grafana_dashboard.json"
_PROVIDER = "metrics/grafana/provisioning/dashboards/default.yml"
_READABLE = 0o644


def dashboard() -> bytes:
    """The dashboard, as JSON."""
    # Not by path: the package may be a zip file.
    return importlib.resources.files(__package__).joinpath("grafana_dashboard.json").read_bytes()


def ray_of(cluster: str | None, *, files: Files) -> RayTarget | None:
    """The Ray in which a cluster runs (None: the only one known here), else the one in RAY_ADDRESS.

    Raises: Rejected when `cluster` names none.
    """
    try:
        paths = local_paths(cluster, files)
    except Rejected:
        if cluster is not None:
            raise
        address = os.environ.get("RAY_ADDRESS")
        return RayTarget(address=address) if address else None
    return find_ray(paths, None, files)


def install(directory: str | None, target: RayTarget | None, *, files: Files) -> Path:
    """Copy the dashboard to `directory`, or to the folder of the Grafana of the Ray at `target`.

    Returns: the file written.
    Raises: Rejected if the directory does not exist, if neither it nor a Ray is given, or if the Ray has no Grafana
    folder here. Raises Unavailable if Ray does not answer, or the directory cannot be written.
    """
    if directory is not None:
        folder = Path(directory)
        if not folder.is_dir():
            raise Rejected(f"{folder} is not a directory", field="directory", path=str(folder))
    elif target is not None:
        with session(target) as ray:
            folder = dashboards_folder(_session_dir(ray), files)
    else:
        message = "no running Ray was found: name Grafana's dashboards folder with --directory"
        raise Rejected(message, field="directory")

    path = folder / FILE_NAME
    files.write_file_atomic(path, dashboard())
    # Grafana often runs as another user.
    os.chmod(path, _READABLE)
    return path


def dashboards_folder(session_dir: Path, files: Files) -> Path:
    """The dashboards folder of a Ray session's Grafana. Raises: Rejected when that folder does not exist."""
    try:
        text = files.read_file(session_dir / _PROVIDER).decode("utf-8", "replace")
    except OSError:
        text = ""

    for line in text.splitlines():
        name, _, path = line.strip().partition(": ")
        folder = Path(path.strip().strip("'\""))
        if name == "path" and folder.is_dir():
            return folder

    message = (
        f"the Ray session in {session_dir} has no folder of Grafana dashboards here: Ray makes it on its head node "
        "when it runs with its dashboard (a Ray that `raymq start` starts does not). Name the folder that your "
        "Grafana reads with --directory"
    )
    raise Rejected(message, field="directory", path=str(session_dir))


def _session_dir(ray: ModuleType) -> Path:
    # A second init only returns the facts of the first.
    context = ray.init(ignore_reinit_error=True, configure_logging=False)
    return Path(context.address_info["session_dir"])
