"""The calls of members go wrong between their client and the shards, without a network that does it."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from raymq.client.transport.flight_client import CALL_TIMEOUT_S
from raymq.client.transport.routes import Routes
from raymq.store.base.clock import Clock
from raymq.store.base.errors import DeliveryUnknown

#: the calls that go wrong
OPERATIONS = ("group_beat", "claim_queues", "commit_offsets")
LATE_MS = 30_000
#: what becomes of a call: all goes well; its request is lost; its answer is lost; it comes twice; its answer is late
FATES = ("well", "unsent", "unanswered", "twice", "late")
WEIGHTS = (6, 1, 1, 1, 1)


class AheadClock(Clock):
    """Runs as the true one, and may jump ahead: nothing happened meanwhile, or the answer to a call was late."""

    def __init__(self) -> None:
        self._ahead_ms = 0

    def monotonic_ms(self) -> int:
        return super().monotonic_ms() + self._ahead_ms

    def monotonic(self) -> float:
        return super().monotonic() + self._ahead_ms / 1000

    def jump(self, ms: int) -> None:
        """Let time pass."""
        self._ahead_ms += ms


class BadNetwork:
    """Threads: any call."""

    def __init__(self, seed: int) -> None:
        self.fates: Counter[str] = Counter()
        self._chance = random.Random(seed)
        self._lock = threading.Lock()
        self._call = Routes.call
        #: id of a client's routes -> the clocks that pass an answer's delay
        self._clocks: dict[int, list[AheadClock]] = {}
        self._is_bad = True

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let the calls of all clients of this process go through here."""

        def call(routes: Routes, *arguments: Any) -> dict[str, Any]:
            return self.call(routes, *arguments)

        monkeypatch.setattr(Routes, "call", call)

    def late_for(self, routes: Routes, *clocks: AheadClock) -> None:
        """When answers to these routes are late, these clocks go on meanwhile."""
        self._clocks[id(routes)] = list(clocks)

    def mend(self) -> None:
        """Let everything go well from now on."""
        self._is_bad = False

    def call(
        self,
        routes: Routes,
        shard: int,
        op: str,
        args: Mapping[str, object],
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> dict[str, Any]:
        """In the place of `Routes.call`."""
        if op not in OPERATIONS or not self._is_bad:
            return self._call(routes, shard, op, args, timeout_s)
        with self._lock:
            (fate,) = self._chance.choices(FATES, WEIGHTS)
            self.fates[fate] += 1
        if fate == "unsent":
            raise DeliveryUnknown(f"{op}: the request is lost")
        answer = self._call(routes, shard, op, args, timeout_s)
        if fate == "unanswered":
            raise DeliveryUnknown(f"{op}: the answer is lost")
        if fate == "twice":
            return self._call(routes, shard, op, args, timeout_s)
        if fate == "late":
            for clock in self._clocks.get(id(routes), ()):
                clock.jump(LATE_MS)
        return answer
