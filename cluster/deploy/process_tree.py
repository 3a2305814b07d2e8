"""Finds and ends all processes of one detached program.

A pid alone does not identify a process, because pids are reused. A process is (pid, start time, boot id). A family is
every process that inherited its leader's mark in the environment, even in a session of its own, such as a Java gateway.
The Ray workers in the leader's session belong to it, too.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from raymq.actors.shared.processes import ProcessHandle, ProcessIdentity, active_ms
from raymq.store.base.clock import Clock
from raymq.store.base.files import Files

#: the environment variable that every process of an owned Ray inherits
MARK = "RAYMQ_OWNED_RAY"
_ORPHAN_GRACE_MS = 1_500


#: the state of a socket that listens, in /proc/net/tcp
_LISTEN = b"0A"


class Family(NamedTuple):
    """A detached process and its descendants."""

    #: of the leader, which is also the id of its session
    pid: int
    #: clock ticks since boot: field 22 of /proc/<pid>/stat
    start_time: int
    boot_id: int
    #: value of MARK in the environment of all of them
    mark: str


class _Facts(NamedTuple):
    pid: int
    command: str
    state: str
    session: int
    start_time: int

    @property
    def zombie(self) -> bool:
        return self.state in "ZX"


def start_time(pid: int, files: Files) -> int | None:
    """The process's start time, None when it is not running (a zombie is not)."""
    facts = _facts(pid, files)
    return None if facts is None or facts.zombie else facts.start_time


def leader_alive(family: Family, files: Files) -> bool:
    """True when the leader itself still runs. A reused pid does not count."""
    return (
        family.boot_id == files.boot_id_hash()
        and start_time(family.pid, files) == family.start_time
    )


def members(family: Family, files: Files) -> list[int]:
    """Pids of the family's running processes, the leader first if it runs."""
    found = [facts.pid for facts in _living(family, files)]
    return sorted(found, key=lambda pid: (pid != family.pid, pid))


def running(family: Family, files: Files) -> list[tuple[str, str]]:
    """The command and the state ("S", "T" for stopped, ... as in /proc/<pid>/stat) of each of its processes."""
    return [(facts.command, facts.state) for facts in _living(family, files)]


def _living(family: Family, files: Files) -> Iterator[_Facts]:
    if family.boot_id != files.boot_id_hash():
        return
    leader = _facts(family.pid, files)
    # The kernel does not reuse a pid while a session has it as its id.
    session_is_ours = leader is None or leader.start_time == family.start_time
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        facts = _facts(pid, files)
        if facts is None or facts.zombie or facts.start_time < family.start_time:
            continue
        # Ray's workers overwrite their environment with their title ("ray::IDLE"), so they have no mark. A child in a
        # session of its own is found by its mark only.
        in_session = session_is_ours and facts.session == family.pid
        if mark_of(pid, files) == family.mark or (in_session and _is_ray_worker(pid, files)):
            yield facts


def active_ms_of(family: Family, files: Files) -> dict[int, float]:
    """Pid -> how long each process of the family has run, and waited for a core. See `processes.active_ms`."""
    return {pid: sum(active_ms(pid, files=files)) for pid in members(family, files)}


def listener(family: Family, port: int, files: Files) -> bool | None:
    """Whether a process of the family listens at a port; None: no process of this machine does."""
    sockets = set()
    for table in ("tcp", "tcp6"):
        # A machine without IPv6 has no second table.
        with contextlib.suppress(FileNotFoundError):
            for line in files.read_file(Path(f"/proc/net/{table}")).splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN and int(fields[1].rpartition(b":")[2], 16) == port:
                    sockets.add(f"socket:[{int(fields[9])}]")
    if not sockets:
        return None
    return any(_has_file(pid, sockets) for pid in members(family, files))


def _has_file(pid: int, names: set[str]) -> bool:
    """Whether a process has one of these files open."""
    with contextlib.suppress(OSError):
        for entry in os.listdir(f"/proc/{pid}/fd"):
            # A file that was closed meanwhile.
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/{entry}") in names:
                    return True
    return False


def end_family(family: Family, *, files: Files, clock: Clock, grace_ms: int) -> list[int]:
    """SIGTERM to the leader, SIGKILL to the others after `grace_ms`. Returns when no process is left.

    Returns: the pids that had to be killed. Raises: TimeoutError when a killed process does not end.
    """
    if leader_alive(family, files):
        _signal(family.pid, family.start_time, signal.SIGTERM, files)
    else:
        # Without the leader no process ends them in order. A few of Ray's end by themselves.
        grace_ms = min(grace_ms, _ORPHAN_GRACE_MS)

    deadline_ms = clock.monotonic_ms() + grace_ms
    while members(family, files) and clock.monotonic_ms() < deadline_ms:
        clock.sleep_ms(50)

    killed: list[int] = []
    deadline_ms = clock.monotonic_ms() + 10_000
    while left := members(family, files):
        for pid in left:
            started = start_time(pid, files)
            if started is not None and _signal(pid, started, signal.SIGKILL, files):
                killed.append(pid)
        if clock.monotonic_ms() > deadline_ms:
            raise TimeoutError(f"processes {left} do not end although they were killed")
        clock.sleep_ms(50)

    return sorted(set(killed))


def _signal(pid: int, started: int, number: int, files: Files) -> bool:
    """Signal exactly that process. Returns: whether it was there."""
    handle = ProcessHandle.open(ProcessIdentity(pid, started), files=files)
    if handle is None:
        return False
    with contextlib.closing(handle):
        handle.kill(number)
    return True


def _facts(pid: int, files: Files) -> _Facts | None:
    text = _proc_file(pid, "stat", files)
    if not text:
        return None
    # The command's name is in parentheses and may itself hold blanks and parentheses.
    end = text.rindex(b")")
    fields = text[end + 2 :].split()
    return _Facts(
        pid=pid,
        command=text[text.index(b"(") + 1 : end].decode("utf-8", "replace"),
        state=fields[0].decode(),
        session=int(fields[3]),
        start_time=int(fields[19]),
    )


def _is_ray_worker(pid: int, files: Files) -> bool:
    return _proc_file(pid, "cmdline", files).startswith(b"ray::")


def mark_of(pid: int, files: Files) -> str:
    """The mark in a process's environment; empty without one."""
    for item in _proc_file(pid, "environ", files).split(b"\0"):
        name, _, value = item.partition(b"=")
        if name == MARK.encode():
            return value.decode("ascii", "replace")
    return ""


def _proc_file(pid: int, name: str, files: Files) -> bytes:
    """The file's content; empty when the process has ended or is another user's."""
    try:
        return files.read_file(Path(f"/proc/{pid}/{name}"))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""
