"""Runs a daemon until its owner ends: starts it again when it ends, and leaves none of its processes.

    python guard.py DIRECTORY OWNER_PID COMMAND...

The program prints its process id and goes into the background. Its owner ends it with SIGTERM. It notices by itself
that the owner has died, also by SIGKILL. In both cases it kills the daemon with all of the daemon's descendants, and
deletes DIRECTORY.

It is not a child of its owner, because Ray kills the children of an actor's process before anything else can act. It
runs by its path, and imports nothing of RayMQ: it must not depend on the environment of the daemon.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

#: of <sys/prctl.h>
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
#: between the end of a daemon and its next start
RESTART_PAUSE_S = 1.0
LOG = "log"


def main(directory: Path, owner_pid: int, command: list[str]) -> int:
    """Go into the background and guard the command. Returns: the exit code of the foreground."""
    owner = os.pidfd_open(owner_pid)
    if os.getppid() != owner_pid:
        # The owner ended before its process could be held: the id may be another process's by now.
        return 1
    asked, ask = os.pipe()
    signal.signal(signal.SIGTERM, lambda number, frame: os.write(ask, b"x"))
    pid = os.fork()
    if pid:
        print(pid, flush=True)
        return 0

    os.setsid()
    log = os.open(directory / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for stream, descriptor in enumerate((nothing, log, log)):
        os.dup2(descriptor, stream)
    # Orphans of the daemon's tree become children of this process, whatever session they are in, and leave no zombies.
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    while True:
        _run(command, [owner, asked])
        kill_children()
        if _wait([owner, asked], RESTART_PAUSE_S):
            break
        print("guard: the daemon ended and is started again", flush=True)
    shutil.rmtree(directory, ignore_errors=True)
    return 0


def _run(command: list[str], ends: list[int]) -> None:
    """Run the daemon until it ends, or one of the descriptors says that it is not needed any more."""
    try:
        daemon = subprocess.Popen(command, preexec_fn=_begin_daemon)
        watched = os.pidfd_open(daemon.pid)
    except OSError as error:
        print(f"guard: the daemon did not start: {error}", flush=True)
        return
    _wait([watched, *ends], None)
    os.close(watched)


def _begin_daemon() -> None:
    """Bind the new process to this one. Callers: the new process, before it becomes the daemon."""
    # If the guard is killed, no process is left to end the daemon.
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _wait(descriptors: list[int], timeout_s: float | None) -> bool:
    """Wait for one of them to become readable; a process's does when it ends. Returns: whether one did."""
    poll = select.poll()
    for each in descriptors:
        poll.register(each, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))


def kill_children() -> None:
    """SIGKILL to the children until none is left: the children of one that has died are this process's then."""
    while pids := _children():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _children() -> list[int]:
    """The children of this process."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid():
            found.append(int(pid))
    return found


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
