"""Starts a daemon of Spark under a guard, in a private directory, and ends it."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from raymq.actors.shared.processes import ProcessHandle, identify
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Unavailable
from raymq.store.base.files import Files

from . import guard

_END_TIMEOUT_S = 20.0
_LOOK_MS = 50
_FOREVER_MS = -1
#: characters of a daemon's log that an error shows
_TAIL = 2_000


def private_directory() -> Path:
    """A new directory of mode 0700 for one daemon; its guard deletes it."""
    return Path(tempfile.mkdtemp(prefix="raymq-spark-"))


def spark_home() -> Path:
    """The directory in which PySpark has Spark's programs. Raises: Unavailable without PySpark."""
    found = importlib.util.find_spec("pyspark")
    if found is None or found.origin is None:
        raise Unavailable(
            "PySpark is missing on this node: pip install 'raymq[spark4]'",
            field="pyspark",
            limit="4.1 or newer",
        )
    return Path(found.origin).parent


def daemon_environment(environment: Mapping[str, str], directory: Path) -> dict[str, str]:
    """The environment of a daemon, without the settings for another Spark that a user may have."""
    kept = {name: text for name, text in environment.items() if not name.startswith("SPARK_")}
    return {
        **kept,
        "SPARK_HOME": str(spark_home()),
        # Spark reads the options here, and no spark-env.sh of a user.
        "SPARK_CONF_DIR": str(directory / "conf"),
        # Of the web pages: a daemon's other addresses are among its arguments.
        "SPARK_LOCAL_IP": "127.0.0.1",
        # The daemons compute nothing.
        "SPARK_DAEMON_MEMORY": "512m",
    }


def write_options(directory: Path, options: Mapping[str, str]) -> None:
    """Write Spark's options where a daemon in this directory finds them, readable by this user alone."""
    place = directory / "conf"
    place.mkdir(mode=0o700)
    text = "".join(f"{name} {value}\n" for name, value in options.items())
    descriptor = os.open(place / "spark-defaults.conf", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)


class GuardedDaemon:
    """A Master or a Worker. It runs until `stop`, or as long as this process, and is started again when it ends."""

    def __init__(
        self, directory: Path, options: Mapping[str, str], words: Sequence[str], *, clock: Clock
    ) -> None:
        """Args: `directory`: a private one. `words`: the class in Spark, and its arguments."""
        self._directory = directory
        self._words = words
        self._clock = clock
        #: of the two fields after it
        self._lock = threading.Lock()
        self._stopping = False
        write_options(directory, options)
        self._guard = self._start_guard()
        self._keeper = threading.Thread(target=self._keep_guard, name="spark-guard", daemon=True)
        self._keeper.start()

    def _start_guard(self) -> ProcessHandle:
        program = str(spark_home() / "bin" / "spark-class")
        directory, owner = str(self._directory), str(os.getpid())
        began = subprocess.run(
            # `-I`: nothing in the environment, which is the daemon's, changes what the guard imports.
            [sys.executable, "-I", guard.__file__, directory, owner, program, *self._words],
            env=daemon_environment(os.environ, self._directory),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=True,
        )
        files = Files()
        identity = identify(int(began.stdout), files=files)
        started = None if identity is None else ProcessHandle.open(identity, files=files)
        if started is None:
            raise Unavailable("the guard of a daemon of Spark ended at once", field="spark")
        return started

    def _keep_guard(self) -> None:
        """Start another guard if the guard was killed: the daemon has ended then."""
        while True:
            self._guard.wait_exit(_FOREVER_MS)
            with self._lock:
                self._guard.close()
                if self._stopping:
                    return
                self._guard = self._start_guard()

    def wait_for(self, text: str, timeout_s: float) -> None:
        """Wait until the daemon's log has a line with this text. Raises: Unavailable with the log's end."""
        deadline_s = self._clock.monotonic() + timeout_s
        while text not in (log := self._read_log()):
            if self._clock.monotonic() > deadline_s:
                raise Unavailable(
                    f"Spark's daemon did not start within {timeout_s:g} s: {log[-_TAIL:] or 'no output'}",
                    field="spark",
                    limit=f"{timeout_s:g} s",
                )
            self._clock.sleep_ms(_LOOK_MS)

    def _read_log(self) -> str:
        try:
            return (self._directory / guard.LOG).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return ""

    def stop(self) -> None:
        """End it and all that it started. Returns when they are gone. Raises: Unavailable if they do not end."""
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
            self._guard.kill(signal.SIGTERM)
        self._keeper.join(_END_TIMEOUT_S)
        if self._keeper.is_alive():
            raise Unavailable(
                f"the processes below process {self._guard.identity.pid} do not end although they were killed",
                field="spark",
                limit=f"{_END_TIMEOUT_S:g} s",
            )


def memory_bytes(text: str) -> int:
    """Spark's sizes, such as "512m" or "2GB", in bytes. Raises: ValueError for other text."""
    found = re.fullmatch(r"(\d+) ?([kmgt])i?b?", text.strip().lower())
    if found is None:
        raise ValueError(text)
    return int(found[1]) << {"k": 10, "m": 20, "g": 30, "t": 40}[found[2]]
