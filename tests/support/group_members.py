"""Members of a group, as tests see them: processes with a history, and single requests."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from raymq.client.consume.consumer import Consumer
from raymq.store.base.errors import DeliveryUnknown, Fenced, Unavailable
from raymq.store.groups.heartbeat import Beat, JoinRequest, pack_beat
from raymq.store.groups.members import MemberFacts, TopicSubscription

ROOT = Path(__file__).resolve().parents[2]

#: an operation and its arguments -> the answer of the leader
Call = Callable[[str, dict[str, Any]], dict[str, Any]]


class Entry(NamedTuple):
    """One line of a member's history."""

    kind: str
    queue: int
    offset: int
    number: int


class MemberProcess:
    """A process that reads as a member (`tests.support.group_worker`)."""

    def __init__(
        self,
        url: str,
        topic: str,
        group: str,
        place: Path,
        environment: Mapping[str, str] | None = None,
        *,
        session_timeout_s: float = 3.0,
    ) -> None:
        """Args: `place`: of its history. `environment`: None: that of this process."""
        self.place = place
        self._read_bytes = 0
        self._owned: set[int] = set()
        self._commits = 0
        command = [sys.executable, "-m", "tests.support.group_worker", url, topic, group]
        words = [str(place), str(session_timeout_s)]
        self.process = subprocess.Popen([*command, *words], cwd=ROOT, env=environment)

    def lines(self) -> list[list[str]]:
        """What it has written down so far."""
        return [line.split() for line in self._written(0).decode().splitlines()]

    def history(self) -> list[Entry]:
        """What it has read and committed."""
        return [
            Entry(line[0], *map(int, line[1:]))
            for line in self.lines()
            if line[0] in ("read", "committed")
        ]

    def queues(self) -> set[int]:
        """The queues that it owned last."""
        self._read_on()
        return self._owned

    def commits(self) -> int:
        """How many offsets it has committed."""
        self._read_on()
        return self._commits

    def end(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()

    def _written(self, start: int) -> bytes:
        """The whole lines from this byte on. A process that is killed may leave a part of one."""
        if not self.place.exists():
            return b""
        with self.place.open("rb") as file:
            file.seek(start)
            found = file.read()
        return found[: found.rfind(b"\n") + 1]

    def _read_on(self) -> None:
        """Take in what it has written down since the last call: a history may be long."""
        written = self._written(self._read_bytes)
        self._read_bytes += len(written)
        for line in written.decode().splitlines():
            kind, *words = line.split()
            if kind == "owns":
                self._owned = set(map(int, words))
            self._commits += kind == "committed"


def read_as_member(
    consumer: Consumer, entries: list[Entry], is_over: threading.Event, *, poll_s: float = 0.05
) -> None:
    """Read and commit until it is over. Faults of the network are only noted by what they lead to."""
    while not is_over.is_set():
        with contextlib.suppress(Fenced, Unavailable, DeliveryUnknown):
            messages = consumer.poll(100, poll_s)
            owned = {queue: number for (_, queue), number in consumer.assignment().items()}
            for each in messages:
                number = owned.get(each.queue_id, 0)
                entries.append(Entry("read", each.queue_id, each.offset, number))
            positions = consumer.positions()
            if any(offset for offset in positions.values()):
                consumer.commit(positions)
                for queue, offset in positions.items():
                    entries.append(Entry("committed", queue, offset, owned.get(queue, 0)))


def check_histories(
    histories: Sequence[Iterable[Entry]], committed: Mapping[int, int], newest: Mapping[int, int]
) -> None:
    """What each member wrote down keeps the promises of a group.

    Args: `committed`: the group's offset of each queue, asked for before the histories were read. `newest`: the same,
    asked for afterwards.
    """
    entries = [list(each) for each in histories]
    owners: dict[tuple[int, int], set[int]] = {}
    for index, each in enumerate(entries):
        for entry in each:
            if entry.number:
                owners.setdefault((entry.queue, entry.number), set()).add(index)
    assert all(len(found) == 1 for found in owners.values()), "a number names two members"

    together = [entry for each in entries for entry in each]
    for queue, offset in committed.items():
        mine = [entry for entry in together if entry.queue == queue]
        read = {entry.offset for entry in mine if entry.kind == "read"}
        assert read >= set(range(offset)), f"a message of queue {queue} was passed over"
        commits = sorted(
            (entry.number, entry.offset)
            for entry in mine
            if entry.kind == "committed" and entry.number
        )
        offsets = [offset for _, offset in commits]
        assert offsets == sorted(offsets), f"a committed offset of queue {queue} went back"
        assert newest[queue] >= max(offsets, default=0), f"a commit of queue {queue} is lost"


class RawMember:
    """A member that sends single requests, and knows only what their answers say."""

    def __init__(self, call: Call, group: str, topic: str, **facts: Any) -> None:
        self.id = uuid.uuid4().hex
        self.version = 0
        self.numbers: dict[int, int] = {}
        self._call, self._group, self._topic = call, group, topic
        subscription = facts.pop("subscription", TopicSubscription((topic,)))
        self.join: JoinRequest | None = JoinRequest(MemberFacts(subscription, **facts))

    def next_beat(self, **fields: Any) -> dict[str, Any]:
        """Its next heartbeat."""
        owned = {(self._topic, queue_id): number for queue_id, number in self.numbers.items()}
        return pack_beat(self._group, Beat(self.id, self.version, owned, self.join, **fields))

    def send(self, beat: dict[str, Any]) -> dict[str, Any]:
        """Send a heartbeat, and leave its answer alone."""
        (answer,) = self._call("group_beat", {"beats": [beat]})["answers"]
        found: dict[str, Any] = answer
        return found

    def take(self, answer: dict[str, Any]) -> None:
        """Apply the answer to a heartbeat."""
        if "assignment" in answer:
            self.version, self.join = answer["version"], None
            queues, numbers = answer["assignment"].get(self._topic, ([], []))
            self.numbers = dict(zip(queues, numbers, strict=True))

    def beat(self, **fields: Any) -> dict[str, Any]:
        """Send a heartbeat, and apply its answer."""
        answer = self.send(self.next_beat(**fields))
        self.take(answer)
        return answer

    def claim(self) -> dict[str, Any]:
        """Claim all its queues."""
        return self._call(
            "claim_queues",
            {
                "group": self._group,
                "topic": self._topic,
                "member": self.id,
                "numbers": as_json(self.numbers),
            },
        )

    def commit(self, offsets: dict[int, int], **more: Any) -> dict[str, Any]:
        """Commit under its numbers."""
        numbers = {each: self.numbers[each] for each in offsets}
        asked = {"group": self._group, "topic": self._topic, "offsets": as_json(offsets)}
        return self._call("commit_offsets", {**asked, "numbers": as_json(numbers), **more})


def as_json(numbers: Mapping[int, int]) -> dict[str, int]:
    """Keys of JSON are text."""
    return {str(queue_id): number for queue_id, number in numbers.items()}
