"""Apache RocketMQ 5.3.3 itself, as a process that is asked in lines of JSON (tests/interop/java).

Maven fetches RocketMQ's jars once, javac compiles our program once. Both are kept in pytest's cache.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .quick_java import QUICK_OPTIONS

SOURCES = Path(__file__).parent.parent / "interop" / "java"
#: RocketMQ's client of 4.9, and what of our sources it runs
OLDER_POM = SOURCES.parent / "java_4_9" / "pom.xml"
OLDER_SOURCES = (SOURCES / "ClientScenarios.java",)
#: named, so that every Maven does the same
MAVEN_GOAL = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1:build-classpath"
#: a small heap, a quick start
JAVA_OPTIONS = ("-Xmx512m", *QUICK_OPTIONS)

Line = dict[str, Any]


class Missing(Exception):
    """No JVM, no Maven or no registry: the text says which, and what to do."""


class Program(NamedTuple):
    """The compiled program and what it runs with."""

    java: str
    class_path: str


class Failed(Exception):
    """RocketMQ refused or failed. Its own words are in the text."""


def find(name: str) -> str:
    """A program of the JDK: of JAVA_HOME, else of PATH. Raises: Missing."""
    home = os.environ.get("JAVA_HOME")
    path = home and shutil.which(name, path=str(Path(home) / "bin"))
    found = path or shutil.which(name)
    if not found:
        raise Missing(f"no {name} in JAVA_HOME or on PATH; install a JDK 17 or newer, and Maven")
    return found


def prepare(cache: Path) -> Program:
    """Fetch and compile what is not yet in `cache`. Raises: Missing; Failed if javac fails."""
    java, javac, maven = find("java"), find("javac"), find("mvn")
    with (cache / "lock").open("w") as lock:
        # Several pytests of a run may ask RocketMQ at the same time.
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _prepare(cache, java, javac, maven)


def prepare_older(cache: Path) -> Program:
    """`prepare` for the client of RocketMQ 4.9."""
    java, javac, maven = find("java"), find("javac"), find("mvn")
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _prepare(cache, java, javac, maven, OLDER_POM, OLDER_SOURCES)


def _prepare(
    cache: Path,
    java: str,
    javac: str,
    maven: str,
    pom: Path = SOURCES / "pom.xml",
    sources: Sequence[Path] = (),
) -> Program:
    """Args: `sources`: what is compiled; none: all."""
    digest = hashlib.sha256()
    for source in sorted((pom, *sources) if sources else SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())

    ready = cache / digest.hexdigest()[:16]
    listed = ready / "classpath"
    if listed.exists():
        jars = listed.read_text(encoding="utf-8")
        if all(Path(jar).exists() for jar in jars.split(os.pathsep)):
            return Program(java, f"{ready}{os.pathsep}{jars}")

    with tempfile.TemporaryDirectory(dir=cache) as folder:
        made = Path(folder) / "made"
        made.mkdir()
        jars = fetch(maven, javac, made / "classpath", pom)
        compile_sources(javac, jars, made, sources or sorted(SOURCES.glob("*.java")))
        shutil.rmtree(ready, ignore_errors=True)
        made.rename(ready)

    return Program(java, f"{ready}{os.pathsep}{jars}")


def fetch(maven: str, javac: str, listed: Path, pom: Path) -> str:
    """The class path of RocketMQ's jars, fetched into Maven's own repository."""
    words = [maven, "-q", "-B", "-f", str(pom), MAVEN_GOAL]
    home = str(Path(javac).resolve().parent.parent)

    try:
        done = subprocess.run(
            [*words, f"-Dmdep.outputFile={listed}", "-Dmdep.includeScope=runtime"],
            env={**os.environ, "JAVA_HOME": home},
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise Missing(f"Maven fetched RocketMQ for {error.timeout} s and did not end") from error

    if done.returncode != 0:
        raise Missing(f"Maven could not fetch RocketMQ:\n{done.stdout[-2000:]}{done.stderr[-500:]}")
    return listed.read_text(encoding="utf-8").strip()


def compile_sources(javac: str, jars: str, target: Path, paths: Sequence[Path]) -> None:
    """Compile our program into `target`."""
    sources = [str(path) for path in paths]
    words = [javac, "--release", "17", "-encoding", "UTF-8", "-proc:none", "-Xlint:all,-serial"]
    words += ["-Werror", "-d", str(target), "-cp", jars, *sources]
    # No annotation processor of a jar, and no complaint about a jar that names another one.
    words.insert(-len(sources), "-Xlint:-path,-classfile,-processing,-options")
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode != 0:
        raise Failed(f"javac:\n{done.stdout}{done.stderr}")


class Oracle:
    """One process of the program. Callers: any thread; one command at a time."""

    def __init__(self, program: Program, home: Path) -> None:
        home.mkdir(exist_ok=True)
        self._errors = home / "errors"
        self._ask_lock = threading.Lock()

        logback = SOURCES / "logback.xml"
        with self._errors.open("w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                [
                    program.java,
                    *JAVA_OPTIONS,
                    f"-Duser.home={home}",
                    f"-Drocketmq.home.dir={home}",
                    f"-Drmq.logback.configurationFile={logback}",
                    "-cp",
                    program.class_path,
                    "Oracle",
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=home,
                text=True,
                encoding="utf-8",
            )

    def ask(self, command: Line) -> list[Line]:
        """The lines of one answer. Raises: Failed with RocketMQ's words."""
        with self._ask_lock:
            return self._ask(command)

    def _ask(self, command: Line) -> list[Line]:
        process = self._process
        if process.stdin is None or process.stdout is None:
            raise TypeError("the process has pipes")
        process.stdin.write(json.dumps(command) + "\n")
        process.stdin.flush()
        lines: list[Line] = []
        for text in process.stdout:
            line = json.loads(text)
            if line["kind"] == "done":
                return lines
            if line["kind"] == "failed":
                raise Failed(f"{command['do']}: {line['error']}\n{self._said()}")
            lines.append(line)
        raise Failed(f"the process ended in {command['do']} ({process.wait()}):\n{self._said()}")

    def _said(self) -> str:
        return self._errors.read_text(encoding="utf-8")[-4000:]

    def close(self) -> None:
        """End the process, which halts at the end of its input if it has not halted already."""
        # A JVM that halts takes long on a busy machine.
        self._process.communicate(timeout=300)


class RocketMQ:
    """RocketMQ on stores with one set of file sizes."""

    def __init__(self, program: Program, oracle: Oracle, scratch: Path, sizes: Line) -> None:
        self._program = program
        self._oracle = oracle
        self._scratch = scratch
        self._sizes = sizes

    def resized(self, **sizes: int) -> RocketMQ:
        """The same process on stores of other file sizes."""
        return RocketMQ(self._program, self._oracle, self._scratch, {**self._sizes, **sizes})

    def read(self, store: Path) -> list[Line]:
        """All that RocketMQ reads of a store. It opens a copy: the store stays as it is."""
        with copied(store, self._scratch) as copy:
            return self._oracle.ask({"do": "read", "dir": str(copy), **self._sizes})

    def serve(self, stores: Iterable[Path]) -> list[Line]:
        """What a consumer of each queue gets of each store, or that RocketMQ refuses the store. It works in them.

        They stay open until the next call, so that they can be copied as a crash would leave them.
        """
        dirs = [str(store) for store in stores]
        return self._oracle.ask({"do": "serve", "dirs": dirs, **self._sizes})

    def write(self, store: Path, messages: Iterable[Line], *, timers: bool = False) -> list[Line]:
        """Put messages into a store and shut it down. `timers` starts RocketMQ's too. Returns: its answers."""
        command = {"do": "write", "dir": str(store), "messages": list(messages)}
        return self._oracle.ask({**command, "timers": timers, **self._sizes})

    def write_and_halt(
        self, store: Path, messages: Iterable[Line], *, timers: bool = False
    ) -> list[Line]:
        """The same in a process of its own, which is then gone as after a crash."""
        crashing = Oracle(self._program, self._new_home())
        command = {"do": "write", "dir": str(store), "messages": list(messages)}
        try:
            return crashing.ask({**command, "timers": timers, "halt": True, **self._sizes})
        finally:
            crashing.close()

    def write_and_leave(
        self, store: Path, messages: Iterable[Line], *, timers: bool = False
    ) -> list[Line]:
        """The same without a process of its own: the store is what a copy of the running one is, quick to have."""
        with tempfile.TemporaryDirectory(dir=self._scratch, ignore_cleanup_errors=True) as folder:
            running = Path(folder) / "store"
            if store.exists():
                copy(store, running)
            command = {"do": "write", "dir": str(running), "messages": list(messages)}
            answers = self._oracle.ask({**command, "timers": timers, "leave": True, **self._sizes})
            shutil.rmtree(store, ignore_errors=True)
            copy(running, store)
        return answers

    def broker(self, store: Path, *, pull: list[Line], push: list[Line]) -> list[Line]:
        """The messages that clients of a real broker on a store consume. The broker starts, serves and stops in order.

        It is a process of its own, with its own name server, on free ports of 127.0.0.1. Args: `pull`: {"topic",
        "count"}, from the first message on. `push`: also "group", from the group's offset on.
        """
        home = self._new_home()
        process = Oracle(self._program, home)
        command = {"do": "broker", "dir": str(store), "home": str(home), "pull": pull, "push": push}
        try:
            return process.ask({**command, **self._sizes})
        finally:
            process.close()

    def _new_home(self) -> Path:
        """A new home directory, because several processes may run at the same time."""
        return Path(tempfile.mkdtemp(prefix="home-", dir=self._scratch))

    def wanted(
        self, expressions: list[str], rows: list[dict[str, str]]
    ) -> dict[str, list[int] | None]:
        """The rows of properties that each SQL92 filter wants; None for one that RocketMQ refuses."""
        lines = self._oracle.ask({"do": "filter", "expressions": expressions, "rows": rows})
        return {line["expression"]: line["wanted"] for line in lines}

    def config(self, store: Path, **tables: Any) -> list[Line]:
        """Read a store's configuration files with the broker's managers, or write them from tables."""
        return self._oracle.ask({"do": "config", "dir": str(store), **tables, **self._sizes})


def copy(store: Path, target: Path) -> None:
    """Copy a store with its holes."""
    words = ["cp", "--archive", "--sparse=always", str(store), str(target)]
    subprocess.run(words, check=True, timeout=60)


class copied:
    """A sparse copy of a store that lives as long as the block."""

    def __init__(self, store: Path, scratch: Path) -> None:
        self._folder = tempfile.TemporaryDirectory(dir=scratch, ignore_cleanup_errors=True)
        self._store = store

    def __enter__(self) -> Path:
        made = Path(self._folder.name) / "store"
        copy(self._store, made)
        return made

    def __exit__(self, *error: object) -> None:
        self._folder.cleanup()
