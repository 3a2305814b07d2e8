"""Programs as a user runs them, each to its end on a data directory of its own. Its test checks its output."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from raymq.cluster.deploy.owned_ray import stop_owned
from raymq.cluster.record.paths import ClusterPaths
from raymq.store.base.clock import Clock
from raymq.store.base.files import Files

from .lean_ray import LEAN
from .leftovers import claim, disk_root
from .workers import end_with_parent

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 180


class Program(NamedTuple):
    """A program of Python."""

    #: the arguments of `python`
    words: tuple[str, ...]
    #: how often it is run on its directory
    runs: int = 1
    #: variables that it has beside those of the tests; its PYTHONPATH follows this tree
    variables: tuple[tuple[str, str], ...] = ()


def example(
    name: str, *variables: tuple[str, str], arguments: tuple[str, ...] = (), runs: int = 1
) -> Program:
    """An example, on a directory `data`."""
    return Program((str(ROOT / "examples" / name), "data", *arguments), runs, variables)


def run(program: Program) -> list[str]:
    """Run a program. Returns: its output of each run. Raises: RuntimeError with it, if it failed or took too long.

    Nothing that was begun stays.
    """
    # Not pytest's directory: it is under /tmp, which a cluster that is meant to last refuses.
    directory = Path(tempfile.mkdtemp(prefix=".raymq-test-", dir=disk_root()))
    claim(directory)

    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY")}
    variables = dict(program.variables)
    python_path = filter(None, (str(ROOT), variables.get("PYTHONPATH")))
    environment = {
        **inherited,
        **LEAN,
        **variables,
        "PYTHONPATH": os.pathsep.join(python_path),
        "RAYMQ_HOME": str(directory / "home"),
        "RAY_AUTH_TOKEN_PATH": str(directory / "ray-token"),
    }

    try:
        return [_run(program, directory, environment) for _ in range(program.runs)]
    finally:
        _clean_up(directory)


def _run(program: Program, directory: Path, environment: dict[str, str]) -> str:
    try:
        done = subprocess.run(
            [sys.executable, *program.words],
            cwd=directory,
            env=environment,
            capture_output=True,
            check=True,
            timeout=TIMEOUT_S,
            preexec_fn=end_with_parent,
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        said = (error.stdout or b"") + (error.stderr or b"")
        raise RuntimeError(f"{error}\n{said.decode(errors='replace')}") from error
    return done.stdout.decode()


def _clean_up(directory: Path) -> None:
    """End the Ray of a program that did not end in order, and remove its directory."""
    for record in directory.glob("*/ray.json"):
        stop_owned(ClusterPaths(record.parent), files=Files(), clock=Clock())
    shutil.rmtree(directory, ignore_errors=True)
