"""Programs as a user runs them, each to its end on a data directory of its own; its test looks at what it printed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 180


class Program(NamedTuple):
    """A program of Python."""

    #: what stands behind `python`
    words: tuple[str, ...]
    #: how often it is run on its directory
    runs: int = 1
    #: variables that it has beside those of the tests
    variables: tuple[tuple[str, str], ...] = ()


def example(name: str, *variables: tuple[str, str]) -> Program:
    """An example, on a directory `data`."""
    return Program((str(ROOT / "examples" / name), "data"), variables=variables)


def run(program: Program) -> list[str]:
    """What it printed, each time. Raises: RuntimeError with all that it said, where it failed."""
    # Not pytest's directory: it is under /tmp, which a cluster that is meant to last refuses.
    place = Path(tempfile.mkdtemp(prefix=".raymq-test-", dir=Path.home()))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY")}
    environment = {
        **inherited,
        **dict(program.variables),
        "PYTHONPATH": str(ROOT),
        "RAYMQ_HOME": str(place / "home"),
        "RAY_AUTH_TOKEN_PATH": str(place / "ray-token"),
    }
    try:
        return [_run(program, place, environment) for _ in range(program.runs)]
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _run(program: Program, place: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, *program.words],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    if done.returncode:
        raise RuntimeError(
            f"{program.words} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        )
    return done.stdout
