"""What a replica's store makes of its log: sequences of producers, queue offsets, store times and consume queues.

All of it is a function of the log, as in the store that ships (`store/engine/followed_log.py`): a start applies the
whole log, a follower applies what it dispatches, a new leader applies the rest, and a cut takes back what it cut off.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from raymq.replication.log_receiver import Truncate
from raymq.store.base.checksum import crc32c
from raymq.store.log.chain import ChainUnit
from tests.support.mirror_world import SEGMENT_BYTES, MemoryLog

#: an EPOCH record: a marker byte, which begins no message, and the epoch
EPOCH_RECORD = b"\xff%15d"
EPOCH_RECORD_BYTES = 16
#: a message: a marker byte, its size, producer, sequence, queue, queue offset and store time; its body follows
MESSAGE = b"\xfe%03d%04d%04d%d%05d%09d"
MESSAGE_BYTES = 27
EPOCH_MARK, MESSAGE_MARK = 0xFF, 0xFE
QUEUES = 2


class Broken(AssertionError):
    """An invariant does not hold."""


class Message(NamedTuple):
    """A message and its place."""

    start: int
    end: int
    producer: int
    sequence: int
    queue: int
    queue_offset: int
    store_time_ms: int
    body: bytes


class ReplicaLog(MemoryLog):
    """A log of whole records, whose epochs are in its bytes, so that they survive the loss of the chain."""

    def durable(self) -> int:
        return self.synced_end if self.flush == "sync" else len(self.data)

    @property
    def last_epoch(self) -> int:
        return 0 if self.is_empty() else self.epoch_at(len(self.data) - 1)

    def epoch_at(self, offset: int) -> int:
        at = self.data.rfind(b"\xff", 0, offset + 1)
        return int(self.data[at + 1 : at + EPOCH_RECORD_BYTES]) if at >= 0 else 0

    def cut_torn_record(self) -> None:
        """Recovery: a part of the last record may be missing."""
        end = whole_end(self.data, len(self.data))
        if end < len(self.data):
            self.truncate_unchecked(end)

    def truncate(self, offset: int) -> None:
        """Cut the log before the record that `offset` is in."""
        super().truncate(whole_end(self.data, offset))

    def rebuild_chain(self, start: int) -> None:
        self.cut_torn_record()
        self.units = [unit for unit in self.units if unit.end <= start]
        self.complete_chain()

    def complete_chain(self) -> None:
        """Add units for bytes without one: a follower that adopts a leader's units loses its own after them."""
        at = self.units[-1].end if self.units else self.start
        while at < len(self.data):
            stop = min(len(self.data), (at // SEGMENT_BYTES + 1) * SEGMENT_BYTES)
            piece = crc32c(bytes(self.data[at:stop]))
            self.units.append(ChainUnit(at, stop, self.epoch_at(at), piece, self.value))
            at = stop

    def equals(self, data: bytes) -> bool:
        """Whether this log has these bytes, as far as both reach, but for those that it has deleted."""
        stop = min(len(self.data), len(data))
        return bytes(self.data[self.start : stop]) == data[self.start : stop]

    def put(self, payload: bytes, epoch: int) -> int:
        """Append a record to its segment, or to the next one after padding."""
        room = SEGMENT_BYTES - len(self.data) % SEGMENT_BYTES
        if room < len(payload):
            self.append(b"\0" * room, epoch)
        return self.append(payload, epoch)


def record_end(data: bytes | bytearray, at: int) -> int:
    """The end of the record at `at`, or of the padding there. It may be after the end of the data."""
    mark = data[at]
    if mark == MESSAGE_MARK:
        size = data[at + 1 : at + 4]
        return at + int(size) if len(size) == 3 else len(data) + 1
    if mark == EPOCH_MARK:
        return at + EPOCH_RECORD_BYTES
    return (at // SEGMENT_BYTES + 1) * SEGMENT_BYTES


def whole_end(data: bytes | bytearray, offset: int) -> int:
    """The end of the last record that ends at or below `offset`. A segment begins with a record."""
    at = offset // SEGMENT_BYTES * SEGMENT_BYTES
    while at < offset:
        end = record_end(data, at)
        if end > offset:
            break
        at = end
    return at


class ShardState:
    """The messages of a log up to an end, also by producer and by queue. A cut takes messages back."""

    def __init__(self) -> None:
        self.end = 0
        self.messages: list[Message] = []
        #: by producer: its messages
        self.by_producer: defaultdict[int, list[Message]] = defaultdict(list)
        #: by queue: its messages
        self.by_queue: list[list[Message]] = [[] for _ in range(QUEUES)]

    def apply(self, data: bytes | bytearray, stop: int) -> None:
        """Apply the records of a log up to `stop`, which is the end of one."""
        at = self.end
        while at < stop:
            end = record_end(data, at)
            if data[at] == MESSAGE_MARK:
                fields = data[at + 4 : at + MESSAGE_BYTES]
                self.add(
                    Message(
                        at,
                        end,
                        int(fields[:4]),
                        int(fields[4:8]),
                        int(fields[8:9]),
                        int(fields[9:14]),
                        int(fields[14:]),
                        bytes(data[at + MESSAGE_BYTES : end]),
                    )
                )
            at = self.end = end

    def add(self, message: Message) -> None:
        """Apply a message."""
        self.messages.append(message)
        self.by_producer[message.producer].append(message)
        self.by_queue[message.queue].append(message)
        self.end = message.end

    def cut(self, end: int) -> None:
        """Take back all messages that end after `end`."""
        messages = self.messages
        while messages and messages[-1].end > end:
            message = messages.pop()
            self.by_producer[message.producer].pop()
            self.by_queue[message.queue].pop()
        self.end = min(self.end, end)

    @property
    def store_time_ms(self) -> int:
        """That of the last message."""
        return self.messages[-1].store_time_ms if self.messages else 0


class ReplicaStore:
    """The store of one replica over its log. Mutants override one method each."""

    def __init__(self, log: ReplicaLog) -> None:
        self.log = log
        self.state = ShardState()
        #: everything below this is in the consume queues
        self.dispatched = 0
        #: the consume queues, on disk
        self.queues: list[list[Message]] = [[] for _ in range(QUEUES)]

    def recover(self) -> None:
        """A process starts: the state has the whole log, and the queues have nothing after its end."""
        end = len(self.log.data)
        self.state.cut(end)
        self.state.apply(self.log.data, end)
        self.cut_queues(end)

    def cut_queues(self, end: int) -> None:
        """Take messages after the end of the log out of the consume queues."""
        self.dispatched = min(self.dispatched, end)
        for queue in self.queues:
            while queue and queue[-1].end > end:
                queue.pop()

    def begin_epoch(self) -> None:
        """This replica leads: the state gets the rest of the log, which is not confirmed."""
        self.state.apply(self.log.data, len(self.log.data))

    def truncate(self, cut: Truncate) -> None:
        """Cut the log for a leader. Raises: Broken if dispatched messages are cut."""
        self.log.truncate(cut.offset)
        end = len(self.log.data)
        if end < self.dispatched:
            raise Broken(f"the log is cut at {end}, and {self.dispatched} bytes are dispatched")
        self.forget_cut(end)

    def forget_cut(self, end: int) -> None:
        """The state loses what was cut off."""
        self.state.cut(end)

    def begin_at(self, data: bytes) -> None:
        """The empty log begins after these bytes, of which a snapshot has the state."""
        self.log.data[:] = data
        self.state = ShardState()
        self.state.apply(data, len(data))
        self.dispatched = len(data)
        self.queues = [list(queue) for queue in self.state.by_queue]

    # --- puts -------------------------------------------------------------------------------------

    def known(self, producer: int) -> list[Message]:
        """What the log has of a producer, as far as the leader remembers it."""
        return self.state.by_producer[producer]

    def admits(self, sequence: int, known: list[Message]) -> bool:
        """Whether a sequence is new, and the next one of its producer, or stored already: a gap is refused."""
        return sequence <= len(known)

    def next_store_time_ms(self, clock_ms: int) -> int:
        """The store time of the next message: that of the clock, but never before the last one."""
        return max(clock_ms, self.state.store_time_ms)

    def append(
        self, producer: int, sequence: int, queue: int, body: bytes, *, clock_ms: int, epoch: int
    ) -> Message:
        """Append a message after those that the state knows. Returns: it, with its place."""
        queued = self.state.by_queue[queue]
        offset = queued[-1].queue_offset + 1 if queued else 0
        time_ms = self.next_store_time_ms(clock_ms)
        size = MESSAGE_BYTES + len(body)
        record = MESSAGE % (size, producer, sequence, queue, offset, time_ms)
        end = self.log.put(record + body, epoch)
        message = Message(end - size, end, producer, sequence, queue, offset, time_ms, body)
        self.state.add(message)
        return message

    def acknowledged_end(self) -> int:
        """A put that ends here or before is acknowledged."""
        return self.log.confirmed_end

    # --- dispatch ---------------------------------------------------------------------------------

    def dispatch_end(self) -> int:
        """Up to where messages go into the consume queues."""
        return self.log.confirmed_end

    def dispatch(self, confirmed: ShardState) -> None:
        """Put messages into the consume queues.

        Args: `confirmed`: the messages that were confirmed, in all replicas.
        Raises: Broken if the queues are not those of the confirmed log.
        """
        stop = self.dispatch_end()
        self.state.apply(self.log.data, stop)
        messages = self.state.messages
        first = len(messages)
        while first and messages[first - 1].end > self.dispatched:
            first -= 1
        for message in messages[first:]:
            if message.end > stop:
                break
            queue, wanted = self.queues[message.queue], confirmed.by_queue[message.queue]
            if len(queue) >= len(wanted) or wanted[len(queue)] != message:
                raise Broken(f"{message} is dispatched to place {len(queue)} of its queue")
            queue.append(message)
        self.dispatched = stop
