"""A world in which a second model of the rules decides as well, and must agree after each record and answer."""

from __future__ import annotations

import json
from typing import Any

from raymq.store.groups.heartbeat import Beat, BeatAnswer

from .reference import Place, Recorded, Reference, ReferenceShard, expect
from .world import GROUP, SESSION_MS, TOPIC, Bounds, Log, Message, World


class ComparedWorld(World):
    """See `reference`. It cannot be copied, so searches do not use it."""

    def __init__(self, bounds: Bounds) -> None:
        super().__init__(bounds)
        self.reference = Reference(self.keys, SESSION_MS, SESSION_MS)
        self.reference_shard = ReferenceShard()
        #: records and answers that were compared
        self.compared = 0
        #: answers of the step that is under way, as many as were sent
        self._answered = 0

    # --- the coordinator --------------------------------------------------------------------------

    def _step(self, beats: list[Beat], asked: list[Message]) -> None:
        self.reference.begin(beats, self.now_ms)
        self._answered = 0
        super()._step(beats, asked)
        if not beats:
            self.reference.end()
        expect(self._answered == len(beats), "answers")

    def note(self, kind: str, value: dict[str, Any]) -> None:
        super().note(kind, value)
        self.reference.take(kind, json.loads(self.log.records[-1][1]))
        self._compare()

    def answer(self, log: Log, message: Message) -> None:
        super().answer(log, message)
        if message.kind != "answer":
            return
        if not self._answered:
            # The records of the step are in the log.
            self.reference.end()
        wanted, found = self.reference.answer(self._answered), message.answer
        self._answered += 1
        self.compared += 1
        if not isinstance(found, BeatAnswer):
            expect(wanted is None, "refused", message, wanted)
            return
        expect(wanted is not None, "not refused", message)
        assert wanted is not None
        version, queues, is_replaced = wanted
        assert message.beat is not None
        heard = None if message.beat.version == version else queues
        if message.beat.is_leaving:
            heard = {}
        expect(
            (found.version, found.assignment, found.is_replaced) == (version, heard, is_replaced),
            "an answer",
            message,
            wanted,
        )

    def expire(self) -> None:
        super().expire()
        expect(not self.reference.is_due(self.now_ms), "a session is over, and nothing came of it")

    def crash(self, end: int, *, with_snapshot: bool = False) -> None:
        records = [(kind, json.loads(body)) for kind, body in self.log.records[:end]]
        self.reference.restart(records)
        super().crash(end, with_snapshot=with_snapshot)
        self._compare()

    def _compare(self) -> None:
        """Compare the state after a record. Raises: Differs."""
        self.compared += 1
        known = self.table.groups.get(GROUP)
        members = {} if known is None else known.members
        places = {
            name: Place(
                each.version,
                dict(each.grants),
                dict(each.revoking),
                each.facts.instance_id,
                each.is_replaced,
                each.is_away,
            )
            for name, each in members.items()
        }
        removed = [] if known is None else list(known.former)
        found = Recorded(self.table.number, places, removed)
        expect(found == self.reference.now, "a record", found, self.reference.now)

    # --- the shard of the queues ------------------------------------------------------------------

    def _take_claim(self, message: Message) -> None:
        wanted = self.reference_shard.claim(message.key[1], message.number, message.member_id)
        super()._take_claim(message)
        self._compare_shard(wanted)

    def _take_commit(self, message: Message) -> None:
        assert message.offset is not None
        wanted = self.reference_shard.commit(message.key[1], message.number, message.offset)
        super()._take_commit(message)
        self._compare_shard(wanted)

    def _compare_shard(self, wanted: int | None) -> None:
        self.compared += 1
        _, message = self.shard_log.waiting[-1]
        expect(message.offset == wanted, "an answer of the shard", message, wanted)
        self._compare_claims()

    def _compare_claims(self) -> None:
        """Compare the claims and the offsets. Raises: Differs."""
        claims = self.claims.claims.get((GROUP, TOPIC), {})
        found = {queue: tuple(claim) for queue, claim in claims.items()}
        expect(found == self.reference_shard.claims, "claims", found, self.reference_shard.claims)
        expect(self.offsets == self.reference_shard.offsets, "offsets", self.offsets)

    def crash_shard(self, end: int, *, with_snapshot: bool = False) -> None:
        super().crash_shard(end, with_snapshot=with_snapshot)
        self.reference_shard = ReferenceShard()
        for kind, body in self.shard_log.records:
            self.reference_shard.take(kind, json.loads(body))
        self._compare_claims()
