"""An environment in which a test's own Ray is the only one that is known."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

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
