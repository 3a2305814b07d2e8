"""Consumer groups of a shard in memory: the machines that ship, without a log."""

from __future__ import annotations

import copy
import threading
import zlib
from typing import Any

from raymq.store.base.clock import Clock
from raymq.store.base.errors import RayMQError, Rejected, to_wire
from raymq.store.groups.claims import ClaimTable, Commit, claim_value
from raymq.store.groups.coordinator import Coordinator
from raymq.store.groups.group_table import GroupTable
from raymq.store.groups.heartbeat import pack_answer, unpack_beat
from raymq.store.groups.members import CLAIM
from raymq.store.state.shard_state import ShardState


class FakeGroups:
    """The operations of `actors/leader/operations/groups.py`."""

    def __init__(self, state: ShardState, clock: Clock, like: FakeGroups | None = None) -> None:
        """Args: `like`: those of another replica, whose log this one has."""
        self.table, self.claims = GroupTable(), ClaimTable()
        if like is not None:
            self.table, self.claims = copy.deepcopy((like.table, like.claims))
        self._state = state
        self._clock = clock
        self._coordinator = Coordinator(self.table)
        self._topics: dict[str, int] = {}
        self._lock = threading.Lock()

    def find_coordinator(self, group: str, shards: int) -> dict[str, Any]:
        return {"shard": zlib.crc32(group.encode()) % shards}

    def beat(self, beats: list[dict[str, Any]]) -> dict[str, Any]:
        """Each heartbeat is a step of its own."""
        answers = []
        with self._lock:
            topics = {info.name: info.queues for info in self._state.topics.values()}
            self._topics = self._topics if topics == self._topics else topics
            for fields in beats:
                now_ms = self._clock.monotonic_ms()
                step = self._coordinator.step(
                    fields["group"], [unpack_beat(fields)], self._topics, now_ms
                )
                for kind, value in step.records:
                    self.table.apply(kind, value)
                (answer,) = self._coordinator.answers(step)
                answers.append(
                    {"error": to_wire(answer)}
                    if isinstance(answer, RayMQError)
                    else pack_answer(answer)
                )
        return {"answers": answers}

    def claim(self, group: str, topic: str, member: str, numbers: dict[str, int]) -> dict[str, Any]:
        with self._lock:
            wanted = {int(queue_id): number for queue_id, number in numbers.items()}
            new, refused = self.claims.plan(group, topic, member, wanted)
            self.claims.apply(CLAIM, claim_value(group, topic, new))
            offsets = self._state.offsets.get((group, topic), {})
            mine = [each for each in wanted if each not in refused and each in offsets]
            return {
                "offsets": {str(each): offsets[each] for each in mine},
                "fenced": {str(each): list(claim) for each, claim in refused.items()},
            }

    def release(
        self, group: str, topic: str, member: str, numbers: dict[str, int]
    ) -> dict[str, Any]:
        with self._lock:
            wanted = {int(queue_id): number for queue_id, number in numbers.items()}
            released = self.claims.plan_release(group, topic, member, wanted)
            self.claims.apply(CLAIM, claim_value(group, topic, released))
            return {}

    def commit(
        self,
        group: str,
        topic: str,
        offsets: dict[str, int],
        numbers: dict[str, int] | None = None,
        seeks: list[int] | None = None,
    ) -> dict[str, Any]:
        with self._lock:
            table = self._state.offsets.setdefault((group, topic), {})
            found = {int(queue_id): offset for queue_id, offset in offsets.items()}
            if numbers is None:
                if self.claims.held(group, topic, found):
                    raise Rejected("a member has it", field="offsets")
                table.update(found)
                return {}
            commits = {
                queue_id: Commit(numbers[str(queue_id)], offset, queue_id in (seeks or ()))
                for queue_id, offset in found.items()
            }
            new, refused = self.claims.plan_commit(group, topic, commits, table)
            table.update(new)
            return {"fenced": {str(each): list(claim) for each, claim in refused.items()}}
