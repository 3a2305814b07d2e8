"""Loads in Java (tests/interop/java), and kills under them: of servers, leaders, satellites, connections."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .oracle import JAVA_OPTIONS, SOURCES, Program
from .replicated_shard import ReplicatedShard, Target, pause, wait_for_leader
from .waiting import until


class JavaLoad:
    """The process of a load, and what it has said: lines of a kind and an id, and a JSON object at the end."""

    def __init__(self, program: Program, home: Path, token: str, name: str, *words: str) -> None:
        """Args: `name`: of its class. `words`: its arguments."""
        self._process = subprocess.Popen(
            [
                program.java,
                *JAVA_OPTIONS,
                f"-Duser.home={home}",
                f"-Drmq.logback.configurationFile={SOURCES / 'logback.xml'}",
                f"-Draymq.secret={token}",
                *("-cp", program.class_path, name, *words),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        #: kind -> the ids of its lines
        self.said: defaultdict[str, list[str]] = defaultdict(list)
        self.end: dict[str, Any] | None = None
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            kind, _, words = line.strip().partition(" ")
            if line.startswith("{"):
                self.end = json.loads(line)
            else:
                self.said[kind].append(words)

    def ids(self, kind: str) -> set[str]:
        """The ids of a kind of line."""
        return {each.split()[0] for each in list(self.said[kind])}

    def wait_for(self, kind: str, more: int) -> None:
        """So many lines of a kind come from now on."""
        wanted = len(self.said[kind]) + more
        until(
            lambda: len(self.said[kind]) >= wanted or self._process.poll() is not None,
            pause,
        )
        assert self._process.poll() is None, self.end

    def order(self, word: str) -> None:
        """Say a word to it."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()

    def result(self) -> dict[str, Any]:
        """What it says when it has ended."""
        self._process.wait(150)
        self._thread.join()
        assert self.end is not None, dict(self.said)
        return self.end

    def kill(self) -> None:
        """End it at once, in the middle of what it does."""
        self._process.kill()
        self._process.wait()
        self._thread.join()

    def close(self) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def door_pid(shard: ReplicatedShard, replica: int) -> int:
    """The process of the server beside a replica."""
    found: list[int] = []

    def look() -> None:
        rows = shard.cluster.doors().get("rocketmq", [])
        found[:] = [row["pid"] for row in rows if row["replica"] == replica]
        if not found:
            pause()

    until(lambda: bool(found), look)
    return found[0]


def kill(pid: int) -> None:
    """End a process by SIGKILL, and wait for its end."""
    with Target(pid) as target:
        target.send(signal.SIGKILL)
        until(target.ended, pause)


def faults(
    shard: ReplicatedShard, cut: Callable[[], object]
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Each fault of one round by its name, and what makes it. Args: `cut`: ends the connections of a load."""

    def role(name: str) -> Callable[[], object]:
        def kill_role() -> None:
            leader = wait_for_leader(shard)
            lease: dict[str, Any] = {}
            until(lambda: bool(lease), lambda: (lease.update(shard.lease(leader, name)), pause()))
            kill(lease["pid"])

        return kill_role

    def hand_over() -> None:
        leader = wait_for_leader(shard)
        shard.cluster.move_leader(0, (leader + 1) % 3)

    def server(step: int = 0) -> None:
        kill(door_pid(shard, (wait_for_leader(shard) + step) % 3))

    def machine() -> None:
        server()
        role("commit_log")()

    yield "server", server
    yield "connections", cut
    yield "leader", role("commit_log")
    yield "flusher", role("group_commit")
    yield "replicator", role("replication")
    yield "server of a follower", lambda: server(1)
    yield "server and leader", machine
    yield "hand-over", hand_over


def doubled(shard: ReplicatedShard, topic: str) -> dict[str, int]:
    """Body -> how often a topic has it, of those that it has more than once."""
    found = Counter(each.body.decode() for each in shard.read(topic))
    return {body: count for body, count in found.items() if count > 1}
