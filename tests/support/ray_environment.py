"""An environment in which a test's own Ray is the only one that is known."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from raymq.cluster.deploy.ray_host import OwnedRay

from .lean_ray import LEAN


@contextlib.contextmanager
def ray_environment(directory: Path, *, lean: bool = True) -> Iterator[None]:
    """No variable of Ray or RayMQ but a home and a token below `directory`. All is as before at the end.

    Args: `lean`: Ray is started without the servers that `lean_ray.py` names.

    The variables that a connection to the cluster's Ray sets (RAY_AUTH_MODE) are removed at the end too.
    """
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith("RAY")]:
        del os.environ[name]
    if lean:
        os.environ.update(LEAN)
    os.environ["RAYMQ_HOME"] = str(directory / "home")
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(directory / "ray-token")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def client_port(owned: OwnedRay) -> int:
    """The port of Ray Client, as Ray's head was started with."""
    words = Path(f"/proc/{owned.pid}/cmdline").read_bytes().split(b"\0")
    (port,) = [w for w in words if w.startswith(b"--ray-client-server-port=")]
    return int(port.partition(b"=")[2])
