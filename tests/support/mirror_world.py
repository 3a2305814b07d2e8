"""A leader and a follower in memory, with a network that a test can cut, drop, double and delay."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from raymq.replication.combiner import PutCombiner
from raymq.replication.log_receiver import (
    Acknowledge,
    AdoptUnits,
    AdvanceConfirmed,
    AppendUnits,
    HaltReplica,
    LogReceiver,
    LogTail,
    Reply,
    Truncate,
    bytes_of,
)
from raymq.replication.log_sender import (
    ClockTick,
    Connect,
    Connected,
    Disconnect,
    Disconnected,
    FrameReceived,
    Halt,
    LeaderProgress,
    LogSender,
    Replicated,
    Send,
    SenderLimits,
)
from raymq.replication.wire import (
    AppendEntries,
    Refusal,
    ReplicaProcess,
    cluster_key,
    decode,
    encode,
)
from raymq.store.base.checksum import crc32c
from raymq.store.base.errors import ChainDamaged, Corrupt
from raymq.store.base.status import PutStatus
from raymq.store.config.promise import PROMISES, Ends, own_durable
from raymq.store.log.chain import ChainUnit

SEGMENT_BYTES = 1000
CLUSTER = cluster_key("world")


class MemoryLog:
    """A log with a chain: a leader's `ChainView` and a follower's store port."""

    def __init__(self, *, flush: str = "sync") -> None:
        self.data = bytearray()
        self.units: list[ChainUnit] = []
        self.synced_end = 0
        self.confirmed_end = 0
        self.flush = flush
        #: bytes below this count as deleted, and the chain value there
        self.start = self.start_value = 0

    # --- as any log -------------------------------------------------------------------------------

    @property
    def value(self) -> int:
        return self.units[-1].value if self.units else self.start_value

    def append(self, payload: bytes, epoch: int = 0) -> int:
        start = len(self.data)
        assert start // SEGMENT_BYTES == (start + len(payload) - 1) // SEGMENT_BYTES
        self.data += payload
        self.units.append(ChainUnit(start, len(self.data), epoch, crc32c(payload), self.value))
        return len(self.data)

    def sync(self) -> None:
        self.synced_end = len(self.data)

    def lose_power(self, keep: int) -> None:
        """Lose what was not synced from `keep` on. The cached chain is rebuilt in larger units."""
        keep = max(keep, self.synced_end)
        self.truncate_unchecked(keep)
        at = self.synced_end // SEGMENT_BYTES * SEGMENT_BYTES
        self.rebuild_chain(at)

    def rebuild_chain(self, start: int) -> None:
        self.units = [unit for unit in self.units if unit.end <= start]
        at = self.units[-1].end if self.units else self.start
        while at < len(self.data):
            stop = min(len(self.data), (at // SEGMENT_BYTES + 1) * SEGMENT_BYTES)
            self.units.append(ChainUnit(at, stop, 0, crc32c(bytes(self.data[at:stop])), self.value))
            at = stop

    def truncate_unchecked(self, offset: int) -> None:
        del self.data[offset:]
        self.units = [unit for unit in self.units if unit.end <= offset]
        self.synced_end = min(self.synced_end, offset)

    def delete_first_segment(self) -> None:
        """Delete the oldest segment. Its bytes stay here, for comparisons."""
        self.start += SEGMENT_BYTES
        last = [unit for unit in self.units if unit.end == self.start]
        self.units = [unit for unit in self.units if unit.start >= self.start]
        self.start_value = last[0].value

    # --- as the leader's chain --------------------------------------------------------------------

    def read_from(self, offset: int, max_bytes: int) -> list[ChainUnit]:
        found: list[ChainUnit] = []
        for unit in self.units:
            if unit.start < offset:
                continue
            if unit.start != (found[-1].end if found else offset):
                break
            if found and (
                unit.end - offset > max_bytes
                or unit.start // SEGMENT_BYTES != offset // SEGMENT_BYTES
            ):
                break
            found.append(unit)
        return found

    # --- as the follower's port -------------------------------------------------------------------

    def is_empty(self) -> bool:
        return len(self.data) <= self.start

    def begin_at(self, start: int, chain_value: int) -> None:
        assert self.is_empty()
        self.data = bytearray(start)
        self.units, self.start, self.start_value = [], start, chain_value
        self.synced_end = start
        self.confirmed_end = min(self.confirmed_end, start)

    def tail(self) -> LogTail:
        return LogTail(len(self.data), self.value, self.units[-1].epoch if self.units else 0)

    def chain_value_at(self, offset: int) -> int | None:
        if offset == self.start:
            return self.start_value
        for unit in self.units:
            if unit.end == offset:
                return unit.value
        return None

    def durable(self) -> int:
        return own_durable(self.flush, self.ends)

    @property
    def ends(self) -> Ends:
        return Ends(len(self.data), len(self.data), self.synced_end, self.confirmed_end)

    def confirmed(self) -> int:
        return self.confirmed_end

    def same_until(self, units: list[ChainUnit], data: memoryview) -> int:
        self._check(units, data)
        start = units[0].start
        mine = self.data[start : start + len(data)]
        for index, byte in enumerate(mine):
            if byte != data[index]:
                return start + index
        return start + len(mine)

    def append_units(self, units: list[ChainUnit], data: memoryview) -> None:
        self._check(units, data)
        assert units[0].start == len(self.data)
        assert units[0].previous == self.value
        self.data += data
        self.units += units

    def adopt_units(self, units: list[ChainUnit], data: memoryview) -> None:
        self._check(units, data)
        assert self.same_until(units, data) == min(len(self.data), units[-1].end)
        start = units[0].start
        self.units = [unit for unit in self.units if unit.end <= start]
        assert units[0].previous == self.value
        self.data += data[len(self.data) - start :] if units[-1].end > len(self.data) else b""
        self.units += units

    def truncate(self, offset: int) -> None:
        if offset < self.confirmed_end:
            raise Corrupt(
                "below the confirmed end", offset=offset, rule="never below the confirmed end"
            )
        self.truncate_unchecked(offset)

    def advance_confirmed(self, confirmed: int) -> None:
        self.confirmed_end = max(self.confirmed_end, min(confirmed, len(self.data)))

    def note_heard(self, confirmed: int, epoch: int) -> None:
        return

    def is_stopping(self) -> bool:
        return False

    def wait_durable(self, offset: int, timeout_ms: int) -> int:
        return self.durable()

    def _check(self, units: list[ChainUnit], data: memoryview) -> None:
        base = units[0].start
        for unit in units:
            if crc32c(bytes(data[unit.start - base : unit.end - base])) != unit.crc:
                raise ChainDamaged("damaged", offset=unit.start, rule="chain crc")


@dataclass
class Packet:
    """A frame under way."""

    connection: int
    to_follower: bool
    frame: bytes
    body: bytes | None


@dataclass
class World:
    """One leader, one follower. `trace` collects what happened since it was read last."""

    flush: str = "sync"
    limits: SenderLimits = field(default_factory=lambda: SenderLimits(frame_bytes=300))
    epoch: int = 0

    def __post_init__(self) -> None:
        self.now = 0
        self.trace: list[str] = []

        self.leader_log = MemoryLog(flush=self.flush)
        self.follower_log = MemoryLog(flush=self.flush)
        self.network: deque[Packet] = deque()
        self.connection = 0
        self.up = True
        self.lives = 0
        self.fill = 0

        #: the confirmed end, as readers of the leader know it
        self.published = 0
        #: puts that are not answered, by number: the end of each
        self.waiting: dict[int, int] = {}
        self.start_leader()
        self.start_follower()

    # --- lives ------------------------------------------------------------------------------------

    def start_leader(self) -> None:
        """Start a new Replication: it knows the confirmed end, and relearns the rest."""
        self.lives += 1
        self.leader = LogSender(
            cluster=CLUSTER,
            shard=0,
            me=ReplicaProcess(0, self.lives),
            follower_id=1,
            chain=self.leader_log,
            segment_size_bytes=SEGMENT_BYTES,
            epoch=self.epoch,
            confirmed=self.published,
            limits=self.limits,
        )

        self.combiner = PutCombiner(
            PROMISES[self.flush, True, "quorum"],
            flush_timeout_ms=5000,
            replica_timeout_ms=3000,
            acknowledged=self.published,
        )

        self.connection = 0
        self.progress()

    def start_follower(self) -> None:
        self.lives += 1
        self.follower = LogReceiver(
            cluster=CLUSTER, shard=0, me=ReplicaProcess(1, 1000 + self.lives)
        )

    def stop_follower(self) -> None:
        self.up = False
        self.disconnect("the follower ended")

    # --- the leader -------------------------------------------------------------------------------

    def put(self, number: int, size: int) -> None:
        log = self.leader_log
        room = SEGMENT_BYTES - len(log.data) % SEGMENT_BYTES
        if room < size:
            log.append(b"\0" * room, self.epoch)
        self.fill += 1
        end = log.append(bytes([self.fill % 251 + 1]) * size, self.epoch)
        self.waiting[number] = end
        self.combiner.add(number, end, self.now)
        self.progress()

    def sync_leader(self) -> None:
        self.leader_log.sync()
        self.progress()

    def progress(self) -> None:
        """Report the leader's progress, as a round of Replicator does."""
        self.combine()
        self.step(LeaderProgress(len(self.leader_log.data), self.published))

    def tick(self, ms: int) -> None:
        self.now += ms
        self.combine()
        self.step(ClockTick())

    def combine(self) -> None:
        """Combine the ends of both logs, and give the answers to puts that CommitLog gives."""
        ends = self.leader_log.ends._replace(replicated=self.leader.replicated_end)
        late = self.combiner.combine(ends, self.now)

        if self.combiner.acknowledged > self.published:
            self.published = self.combiner.acknowledged
            self.leader_log.advance_confirmed(self.published)
            self.trace.append(f"confirmed end = {self.published}")

        for number, end in list(self.waiting.items()):
            outcomes = [
                entry.status for entry in late if number <= entry.number and end <= entry.end
            ]
            if end <= self.published:
                outcomes = [PutStatus.PUT_OK]
            if outcomes:
                self.trace.append(f"put {number}: {outcomes[0].value}")
                del self.waiting[number]

    def step(self, event) -> None:
        for effect in self.leader.step(event, self.now):
            if isinstance(effect, Send):
                body = bytes(self.leader_log.data[effect.start : effect.stop]) or None
                frame = encode(effect.header, effect.message)
                self.trace.append(f"leader sends {describe(effect.message)}")
                if self.connection:
                    self.network.append(Packet(self.connection, True, frame, body))
            elif isinstance(effect, Connect):
                self.connect()
            elif isinstance(effect, Disconnect):
                self.trace.append(f"leader disconnects: {effect.reason}")
                self.connection = 0
            elif isinstance(effect, Replicated):
                self.combine()
            elif isinstance(effect, Halt):
                self.trace.append(f"leader HALTS: {effect.reason}")

        if self.published > self.leader.confirmed:
            self.step(LeaderProgress(len(self.leader_log.data), self.published))

    def connect(self) -> None:
        if self.up:
            self.lives += 1
            self.connection = self.lives
            self.step(Connected())
        else:
            self.step(Disconnected("refused"))

    def disconnect(self, reason: str) -> None:
        if self.connection:
            self.connection = 0
            self.step(Disconnected(reason))

    # --- the follower -----------------------------------------------------------------------------

    def sync_follower(self) -> None:
        self.follower_log.sync()
        self.acknowledge()

    def acknowledge(self) -> None:
        if self.up and self.follower.matched:
            ack = self.follower.acknowledge(self.follower_log)
            self.reply(self.follower.header(), ack)

    def reply(self, header, message) -> None:
        self.trace.append(f"follower sends {describe(message)}")
        self.network.append(Packet(self.connection, False, encode(header, message), None))

    def serve(self, packet: Packet) -> None:
        """As FollowerSession does."""
        header, message = decode(packet.frame)
        body = None if packet.body is None else memoryview(packet.body)
        if isinstance(message, AppendEntries):
            assert len(packet.body or b"") == message.end - message.prev_end

        machine, log = self.follower, self.follower_log
        dropped = machine.dropped
        for effect in machine.step(header, message, body, log):
            if isinstance(effect, AppendUnits):
                self.trace.append(f"follower appends [{spans(effect.units)}]")
                log.append_units(list(effect.units), bytes_of(effect.units, body))
            elif isinstance(effect, AdoptUnits):
                self.trace.append(f"follower adopts [{spans(effect.units)}]")
                log.adopt_units(list(effect.units), bytes_of(effect.units, body))
            elif isinstance(effect, Truncate):
                self.trace.append(f"follower truncates to {effect.offset}")
                log.truncate(effect.offset)
            elif isinstance(effect, AdvanceConfirmed):
                log.advance_confirmed(effect.confirmed)
            elif isinstance(effect, HaltReplica):
                self.trace.append(f"follower HALTS: {effect.reason}")
            elif isinstance(effect, Acknowledge):
                self.acknowledge()
            elif isinstance(effect, Reply):
                answering = machine.header()._replace(
                    addressee=header.sender, session=header.session
                )
                self.reply(answering, effect.message)
                if isinstance(effect.message, Refusal) and answering == machine.header():
                    machine.leave()

        if machine.dropped > dropped:
            self.trace.append(f"follower drops {describe(message)}")

    # --- the network ------------------------------------------------------------------------------

    def deliver(self, packet: Packet) -> None:
        if packet.to_follower:
            if self.up:
                self.serve(packet)
            return
        dropped = self.leader.dropped
        header, message = decode(packet.frame)
        self.step(FrameReceived(header, message))
        if self.leader.dropped > dropped:
            self.trace.append(f"leader drops {describe(message)}")

    def deliver_all(self) -> None:
        """Deliver every frame under way, and those that it causes, until none is left."""
        while self.network:
            self.deliver(self.network.popleft())


def describe(message) -> str:
    if isinstance(message, AppendEntries):
        units = f" [{spans(message.units)}]" if message.units else ""
        return f"AppendEntries after {message.prev_end}{units} confirmed={message.confirmed}"
    if isinstance(message, Refusal):
        return f"Refusal highest_epoch={message.highest_epoch} {message.text}"
    name = type(message).__name__
    if name == "Probe":
        return f"Probe of {len(message.candidates)} up to {message.candidates[-1][0]}"
    hidden = ("chain_value", "last_end")
    facts = [f"{k}={v}" for k, v in message._asdict().items() if k not in hidden]
    return f"{name} {' '.join(facts)}"


def spans(units) -> str:
    return " ".join(f"{unit.start}..{unit.end}" for unit in units)
