"""The sends and receipts of producers, and the check whether a log keeps every promise."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import NamedTuple

import raymq
from raymq.client.consume.consumer import Consumer
from raymq.client.consume.consumer_config import ReadFrom
from raymq.client.produce.producer import Producer
from raymq.client.produce.send_future import SendFuture
from raymq.store.base.errors import DeliveryUnknown, Fenced, Rejected, Unavailable
from raymq.store.config.promise import Acks

SequenceKey = tuple[int, int]
"""(producer, queue): the messages of each pair are numbered from 0 on, in the order of their sends."""

PADDING = b"." * 360


class Read(NamedTuple):
    """One message as it came back."""

    queue: int
    offset: int
    body: bytes


class Committed(NamedTuple):
    """The next offset of a consumer group in one queue: its commit was acknowledged, or the cluster names it."""

    queue: int
    offset: int


def body(producer: int, queue: int, number: int) -> bytes:
    """The message's place in the history, and something to fill files with."""
    return b"%d/%d/%d/" % (producer, queue, number) + PADDING


class History:
    """Sends and acknowledgements of all producers. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: dict[SequenceKey, int] = {}
        self._acked: dict[SequenceKey, dict[int, int]] = {}

    def send(self, producer: int, queue: int) -> int:
        """The next number of a producer in a queue, noted as sent."""
        with self._lock:
            number = self._sent.get((producer, queue), 0)
            self._sent[producer, queue] = number + 1
            return number

    def ack(self, producer: int, queue: int, number: int, offset: int) -> None:
        """Note a receipt. `offset` is -1 if the receipt has none."""
        with self._lock:
            self._acked.setdefault((producer, queue), {})[number] = offset

    def sent(self) -> dict[SequenceKey, int]:
        """(producer, queue) -> how many were sent."""
        with self._lock:
            return dict(self._sent)

    def acked(self) -> dict[SequenceKey, dict[int, int]]:
        """(producer, queue) -> number -> promised offset."""
        with self._lock:
            return {key: dict(numbers) for key, numbers in self._acked.items()}

    def count(self) -> int:
        """How many messages have receipts."""
        with self._lock:
            return sum(map(len, self._acked.values()))

    def acked_beyond(self, sent: dict[SequenceKey, int]) -> bool:
        """Whether every producer and queue has a receipt for something sent after `sent` was taken."""
        with self._lock:
            return all(
                max(self._acked.get(key, {}), default=-1) >= count for key, count in sent.items()
            )


class Fault(NamedTuple):
    """A promise that was broken."""

    #: "lost": acknowledged and not there; "phantom": there and never sent so; "duplicate"; "reordered";
    #: "non-monotonic": visible once and not later; "misplaced": not where its receipt says; "offset regress": a
    #: group's committed offset was further once
    verdict: str
    what: str


def faults(
    acked: dict[SequenceKey, dict[int, int]],
    reads: Iterable[Read],
    sent: dict[SequenceKey, int],
    seen: Iterable[Sequence[Read]] = (),
    committed: Iterable[Sequence[Committed]] = (),
) -> list[Fault]:
    """The faults of a log; empty without any.

    Args:
        acked: the receipts before the reading began.
        reads: every queue from its start, in the order of its offsets.
        sent: the counts after the reading ended.
        seen: the messages of each reader meanwhile, in its order, from the start of each queue.
        committed: the offsets of each consumer group, whose consumers commit only what is further, in the order in
            which they were acknowledged or named.

    A message that was sent and not acknowledged may be there or not, but not twice and not out of order.
    """
    log = list(reads)
    found, offsets = _check_log(log, sent)
    found += _check_receipts(acked, offsets)
    stored = {(read.queue, read.offset): read.body for read in log}
    for reader, got in enumerate(seen):
        found += _check_reader(f"reader {reader}", got, stored)
    for group, offsets_of_group in enumerate(committed):
        found += _check_group(f"group {group}", offsets_of_group)
    return found


def _check_log(
    log: Sequence[Read], sent: dict[SequenceKey, int]
) -> tuple[list[Fault], dict[SequenceKey, dict[int, int]]]:
    """Faults of the log alone, and the offset of each message."""
    found: list[Fault] = []
    next_offset: dict[int, int] = {}
    last: dict[SequenceKey, int] = {}
    offsets: dict[SequenceKey, dict[int, int]] = {}

    for read in log:
        expected = next_offset.get(read.queue, 0)
        if read.offset != expected:
            what = f"queue {read.queue}: offset {read.offset} where {expected} belongs"
            found.append(Fault("non-monotonic", what))
        next_offset[read.queue] = read.offset + 1

        try:
            producer, queue, number = map(int, read.body.split(b"/", 3)[:3])
        except ValueError:
            what = f"queue {read.queue} offset {read.offset}: foreign {read.body[:30]!r}"
            found.append(Fault("phantom", what))
            continue

        key = (producer, queue)
        name = _name(key, number)
        if queue != read.queue or read.body != body(producer, queue, number):
            found.append(Fault("phantom", f"{name}: altered, or in queue {read.queue}"))
            continue
        if not 0 <= number < sent.get(key, 0):
            found.append(Fault("phantom", f"{name}: was never sent"))
            continue
        if number in offsets.setdefault(key, {}):
            what = f"{name}: stored twice, at {offsets[key][number]} and {read.offset}"
            found.append(Fault("duplicate", what))
            continue
        if number < last.get(key, -1):
            found.append(Fault("reordered", f"{name}: stored after number {last[key]}"))

        offsets[key][number] = read.offset
        last[key] = max(number, last.get(key, -1))

    return found, offsets


def _check_receipts(
    acked: dict[SequenceKey, dict[int, int]], offsets: dict[SequenceKey, dict[int, int]]
) -> list[Fault]:
    """Check that each message with a receipt is at the receipt's offset."""
    found: list[Fault] = []
    promised: dict[tuple[int, int], str] = {}

    for key, numbers in acked.items():
        stored = offsets.get(key, {})
        for number, offset in sorted(numbers.items()):
            name = _name(key, number)
            if number not in stored:
                found.append(Fault("lost", f"{name}: acknowledged at offset {offset} and lost"))
            elif offset not in (-1, stored[number]):
                what = f"{name}: acknowledged at {offset}, stored at {stored[number]}"
                found.append(Fault("misplaced", what))
            other = promised.setdefault((key[1], offset), name)
            if offset != -1 and other != name:
                what = f"{name}: acknowledged at {offset}, which is promised to {other}"
                found.append(Fault("duplicate", what))

    return found


def _check_reader(
    reader: str, got: Sequence[Read], stored: dict[tuple[int, int], bytes]
) -> list[Fault]:
    """Check that a reader continues without a gap, never goes back, and that its messages stay."""
    found: list[Fault] = []
    next_offset: dict[int, int] = {}
    for read in got:
        expected = next_offset.get(read.queue, 0)
        if read.offset != expected:
            what = f"{reader}, queue {read.queue}: offset {read.offset} where {expected} belongs"
            found.append(Fault("non-monotonic", what))
        next_offset[read.queue] = read.offset + 1
        if stored.get((read.queue, read.offset)) != read.body:
            what = f"{reader}, queue {read.queue}: offset {read.offset} is gone, or another now"
            found.append(Fault("non-monotonic", what))
    return found


def _check_group(group: str, committed: Sequence[Committed]) -> list[Fault]:
    """Check that a group's offset never goes back in any queue."""
    found: list[Fault] = []
    furthest: dict[int, int] = {}
    for queue, offset in committed:
        before = furthest.get(queue, 0)
        if offset < before:
            what = f"{group}, queue {queue}: offset {offset} after {before}"
            found.append(Fault("offset regress", what))
        furthest[queue] = max(before, offset)
    return found


def _name(key: SequenceKey, number: int) -> str:
    return f"producer {key[0]} queue {key[1]} number {number}"


class Reader:
    """Reads a topic from its start in a thread of its own, and keeps the messages.

    As a context manager from entry to exit, or to `stop`.
    """

    def __init__(self, cluster: raymq.Cluster, topic: str, read_from: ReadFrom = "leader") -> None:
        self.got: list[Read] = []
        self._read_from = read_from
        self._cluster, self._topic = cluster, topic
        self._failure: BaseException | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reader", daemon=True)

    def __enter__(self) -> Reader:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join(30.0)

    @property
    def failed(self) -> bool:
        """Whether it reads no more."""
        return self._failure is not None

    def stop(self) -> None:
        """Read no more. Raises: what failed."""
        self.__exit__()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            with self._cluster.consumer(
                self._topic, start="earliest", read_from=self._read_from
            ) as consumer:
                while not self._ended.is_set():
                    try:
                        messages = consumer.poll(timeout=0.2)
                    except Unavailable:
                        # The shard is away longer than a poll tries. The position stays.
                        continue
                    self.got += [Read(m.queue_id, m.offset, m.body) for m in messages]
        except BaseException as error:
            self._failure = error


class GroupReader(Reader):
    """Reads as a consumer group, which commits after each poll, and begins again where the cluster says it was.

    `committed` has each offset that a commit acknowledged, or that the cluster named, in order.
    """

    #: commits after which another consumer takes the place of the first
    COMMITS = 20

    def __init__(self, cluster: raymq.Cluster, topic: str, group: str) -> None:
        super().__init__(cluster, topic)
        self.committed: list[Committed] = []
        self._group = group

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                try:
                    self._consume()
                except (Unavailable, DeliveryUnknown, Fenced):
                    # No answer said where the group is, or its session ended while no shard answered. Only reads count,
                    # and these are after the last commit.
                    continue
        except BaseException as error:
            self._failure = error

    def _consume(self) -> None:
        """Read with one consumer until it has committed often enough. Its last commit is acknowledged."""
        with self._cluster.consumer(self._topic, group=self._group, start="earliest") as consumer:
            self._note(consumer.positions())
            commits = 0
            while commits < self.COMMITS:
                commits += self._read_and_commit(consumer)
                if self._ended.is_set() and commits:
                    break

    def _read_and_commit(self, consumer: Consumer) -> bool:
        """Whether there were messages, and the commit after them is acknowledged."""
        try:
            messages = consumer.poll(timeout=0.2)
        except Unavailable:
            return False
        self.got += [Read(m.queue_id, m.offset, m.body) for m in messages]
        if not messages and not self._ended.is_set():
            return False
        try:
            consumer.commit()
        except (Unavailable, DeliveryUnknown):
            # It may be stored or not. The next one is further.
            return False
        self._note(consumer.positions())
        with suppress(Unavailable, DeliveryUnknown):
            self._note(consumer.committed())
        return True

    def _note(self, offsets: Mapping[int, int]) -> None:
        self.committed += [Committed(queue, offset) for queue, offset in sorted(offsets.items())]


class Load:
    """Producers that write all the time, each in a thread of its own, noting what happens.

    They take the ack modes in turns.

    As a context manager it writes from entry to exit, or to `stop`. Nothing may fail: `failure`
    is the first thing that did, and `ended` is set then.
    """

    #: messages that go together, and how many of such groups may wait for receipts
    GROUP, GROUPS = 12, 8
    PACE_S = 0.02
    RECEIPT_S = 90.0

    def __init__(
        self,
        cluster: raymq.Cluster,
        topic: str,
        history: History,
        *,
        producers: int,
        queues: int,
        acks: Sequence[Acks] = ("quorum",),
    ) -> None:
        self.history = history
        self.ended = threading.Event()
        self.failure: BaseException | None = None
        self._cluster, self._topic, self._queues = cluster, topic, queues
        self._acks = acks
        self._threads = [
            threading.Thread(target=self._run, args=(number,), name=f"load-{number}", daemon=True)
            for number in range(producers)
        ]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.ended.set()
        for thread in self._threads:
            thread.join(self.RECEIPT_S + 10)

    def stop(self) -> None:
        """Send no more and wait for the receipts of what is under way. Raises: what failed."""
        self.__exit__()
        if self.failure is not None:
            raise self.failure

    def pause(self) -> None:
        """Give the producers a moment. Raises: what failed."""
        self.ended.wait(self.PACE_S)
        if self.failure is not None:
            raise self.failure

    def _run(self, producer: int) -> None:
        groups: deque[list[tuple[int, int, SendFuture]]] = deque()
        try:
            acks = self._acks[producer % len(self._acks)]
            with self._producer(acks) as sender:
                while not self.ended.is_set():
                    group = []
                    for turn in range(self.GROUP):
                        group += self._send(sender, producer, turn % self._queues)
                    groups.append(group)
                    while len(groups) > self.GROUPS or (groups and groups[0][-1][2].done()):
                        self._note(producer, groups.popleft())
                    self.ended.wait(self.PACE_S)
                while groups:
                    self._note(producer, groups.popleft())
        except BaseException as error:
            self.failure = self.failure or error
            self.ended.set()

    def _producer(self, acks: Acks) -> AbstractContextManager[Producer]:
        """A producer for one thread."""
        return self._cluster.producer(acks=acks)

    def _send(
        self, sender: Producer, producer: int, queue: int
    ) -> list[tuple[int, int, SendFuture]]:
        """Send the next message of a queue. Returns: what `_note` takes."""
        number = self.history.send(producer, queue)
        text = body(producer, queue, number)
        return [(queue, number, sender.send(self._topic, text, queue_id=queue))]

    def _note(self, producer: int, group: list[tuple[int, int, SendFuture]]) -> None:
        for queue, number, future in group:
            self.history.ack(producer, queue, number, future.result(self.RECEIPT_S).offset)


class LoadWithRefusals(Load):
    """One that sends messages without a key among the others, to a compacted topic: the shard refuses each of them.

    `refused` counts them. One that is stored all the same is a phantom of the history.
    """

    #: in place of the number of a message that is refused
    REFUSED = -1
    #: of so many messages, one is sent together with one that is refused
    ONE_IN = 5

    refused = 0

    @contextmanager
    def _producer(self, acks: Acks) -> Iterator[Producer]:
        sender = self._cluster.producer(acks=acks)
        try:
            yield sender
        finally:
            # It raises a refusal that `_note` has not seen yet. One in the block is a failure of the load.
            with suppress(Rejected):
                sender.close()

    def _send(
        self, sender: Producer, producer: int, queue: int
    ) -> list[tuple[int, int, SendFuture]]:
        number = self.history.send(producer, queue)
        text, key = body(producer, queue, number), f"{producer}-{queue}-{number}"
        sent = []
        if number % self.ONE_IN == 0:
            refused = sender.send(self._topic, b"is refused" + PADDING, queue_id=queue)
            sent.append((queue, self.REFUSED, refused))
        future = sender.send(self._topic, text, queue_id=queue, index_keys=(key,))
        return [*sent, (queue, number, future)]

    def _note(self, producer: int, group: list[tuple[int, int, SendFuture]]) -> None:
        for queue, number, future in group:
            if number != self.REFUSED:
                super()._note(producer, [(queue, number, future)])
                continue
            try:
                receipt = future.result(self.RECEIPT_S)
            except Rejected as error:
                if error.field != "KEYS":
                    raise
                self.refused += 1
            else:
                raise AssertionError(f"a message without a key has the receipt {receipt}")
