"""A store with its delay service, driven step by step, and what it must have delivered."""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple

import numpy as np

from raymq.store.base.files import Files
from raymq.store.config.store_config import StoreConfig
from raymq.store.delay.delay_hook import transform
from raymq.store.delay.delay_service import DelayService
from raymq.store.engine.message_store import MessageStore
from raymq.store.put.inner_message import InnerMessage
from raymq.store.records import record
from raymq.store.records.properties import decode
from tests.support.clock import ManualClock
from tests.support.confirming import confirm

CONFIG = StoreConfig(
    segment_size_bytes=32 * 1024,
    consume_queue_file_size_bytes=2000,
    timer_log_file_size_bytes=4096,
    max_hash_slot_num=100,
    max_index_num=400,
    prewrite_window_bytes=8 * 1024,
    max_message_bytes=2000,
    message_delay_level="1s 5s 10s 1m",
)
LEVELS_MS = CONFIG.delay_levels_ms
#: the wall clock's start: a full second
START_MS = 1_700_000_000_000


class Sent(NamedTuple):
    """One message that was put to be delivered later."""

    body: bytes
    queue: int
    due_ms: int
    level: int


class Arrived(NamedTuple):
    """One message that is in its real queue."""

    body: bytes
    queue: int
    offset: int
    store_time_ms: int
    properties: dict[str, str]


class DelayWorld:
    """One life of a store after the other on the same directory."""

    def __init__(
        self,
        root: Path,
        files: Files | None = None,
        *,
        clock: ManualClock | None = None,
        config: StoreConfig = CONFIG,
    ) -> None:
        self.root = root
        self.files = files
        self.config = config
        self.clock = clock or ManualClock(START_MS)
        self.sent: dict[bytes, Sent] = {}
        self.store: MessageStore
        self.delays: DelayService
        self.open()

    def open(self) -> None:
        """Recover as a host does."""
        self.store = MessageStore.open(
            self.root, config=self.config, files=self.files, clock=self.clock
        )
        self.delays = DelayService(self.store)
        self.confirm()

    def kill(self) -> None:
        """End as SIGKILL does, and start again."""
        self.store.abandon()
        self.open()

    def restart(self) -> None:
        """End in order, and start again."""
        self.close()
        self.open()

    def close(self) -> None:
        """End in order."""
        self.confirm()
        self.delays.timers.close(self.clock.now_ms())
        self.store.close()

    def confirm(self) -> None:
        """Sync, confirm, dispatch."""
        confirm(self.store)

    def put(self, message: InnerMessage) -> None:
        """Put a message through the delay hook."""
        self.store.put_inner([transform(message, self.clock.now_ms(), self.config)])

    def send(
        self,
        body: bytes,
        *,
        queue: int = 0,
        level: int = 0,
        delay_ms: int = 0,
        properties: dict[str, str] | None = None,
    ) -> Sent:
        """Put a message that is to be delivered after a level's time, or `delay_ms`."""
        now = self.clock.now_ms()
        how = {"DELAY": str(level)} if level else {"TIMER_DELAY_MS": str(delay_ms)}
        self.put(
            InnerMessage(
                "t",
                queue,
                body,
                {"UNIQ_KEY": body.hex(), **how, **(properties or {})},
                born_time_ms=now,
            )
        )
        due = now + (LEVELS_MS[level - 1] if level else delay_ms)
        self.sent[body] = Sent(body, queue, due, level)
        return self.sent[body]

    def cancel(self, sent: Sent, *, shift_ms: int = 0) -> None:
        """Put what cancels a timer. `shift_ms` makes it one of another second."""
        self.put(
            InnerMessage(
                "t",
                sent.queue,
                b"cancel",
                {
                    "TIMER_DEL_UNIQKEY": f"t+{sent.body.hex()}",
                    "TIMER_DELIVER_MS": str(sent.due_ms + shift_ms),
                },
            )
        )

    def step(self) -> None:
        """One run, as the clock stands."""
        self.delays.run_once(self.clock.now_ms())
        self.confirm()

    def run(self, *, limit: int = 8192) -> int | None:
        """Deliver what is due, all of it, each run confirmed. Returns: when the next is due."""
        while True:
            ran = self.delays.run_once(self.clock.now_ms(), limit=limit)
            self.confirm()
            if ran.next_due_ms is None or ran.next_due_ms > self.clock.now_ms() + 100:
                return ran.next_due_ms
            if ran.next_due_ms > self.clock.now_ms():
                self.clock.advance(ran.next_due_ms - self.clock.now_ms())

    def run_out(self) -> None:
        """Run until nothing waits."""
        due = self.run()
        while due is not None:
            self.clock.advance(max(0, due - self.clock.now_ms()))
            due = self.run()

    def arrived(self, topic: str = "t") -> list[Arrived]:
        """The messages in the real queues."""
        found: list[Arrived] = []
        for name, queue in self.store.queues():
            if name == topic:
                found += self._queue(topic, queue)
        return found

    def _queue(self, topic: str, queue: int) -> list[Arrived]:
        found: list[Arrived] = []
        low, high = self.store.queue_range(topic, queue)
        while low < high:
            part = self.store.fetch(topic, queue, low, max_bytes=1 << 20, max_records=1000)
            assert part.records is not None

            sizes = np.array([len(raw) for raw in part.records.to_pylist()])
            raw = b"".join(part.records.to_pylist())
            rows = record.decode(raw, np.cumsum(sizes) - sizes, sizes).to_pylist()
            found += [
                Arrived(
                    row["body"],
                    queue,
                    row["queue_offset"],
                    row["store_time_ms"],
                    decode(row["properties"]),
                )
                for row in rows
            ]
            low = part.next_offset

        return found

    def check(self, expected: set[bytes], *, never_early: bool = True) -> None:
        """Every expected message arrived once, in its queue, at its time. Nothing else did."""
        arrived = self.arrived()
        bodies = [each.body for each in arrived]
        assert len(bodies) == len(set(bodies)), "delivered twice"
        assert set(bodies) == expected
        for each in arrived:
            sent = self.sent[each.body]
            assert each.queue == sent.queue
            assert not never_early or each.store_time_ms >= sent.due_ms, "delivered early"


def burst(world: DelayWorld, chance: random.Random, number: int) -> list[bytes]:
    """Many for one second: more than one bundle."""
    delay_ms = chance.randrange(1, 4_000)
    bodies = [b"b%d-%d-" % (number, row) + bytes(200) for row in range(40)]
    for row, body in enumerate(bodies):
        world.send(body, queue=row % 3, delay_ms=delay_ms)
    return bodies


def random_send(world: DelayWorld, chance: random.Random, number: int) -> Sent:
    """A level, a timer of seconds, of minutes, or of days, which rolls."""
    body = b"m%d-" % number + chance.randbytes(chance.randrange(1, 200))
    queue = chance.randrange(3)
    kind = chance.randrange(8)
    if kind < 2:
        return world.send(body, queue=queue, level=chance.randrange(1, len(LEVELS_MS) + 1))
    if kind == 2:
        return world.send(body, queue=queue, delay_ms=chance.randrange(172_700_000, 259_000_000))
    if kind == 3:
        return world.send(body, queue=queue, delay_ms=chance.randrange(60_000, 3_600_000))
    return world.send(body, queue=queue, delay_ms=chance.randrange(1, 6_000))
