"""Transactions as programs see them: messages, offsets and acks that count together, or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Protocol, TypeVar

import numpy as np

from raymq.actors.api.leases import check_packed_offsets
from raymq.actors.api.transactions import pack_acks, pack_offset_commit, pack_rows
from raymq.client.arguments import check_number
from raymq.client.messages.message import Message, Receipt
from raymq.store.base.clock import Clock
from raymq.store.base.errors import CommitUnknown, Fenced, RayMQError, Rejected
from raymq.store.groups.claims import Commit
from raymq.store.groups.leases.entries import SettleOutcome
from raymq.store.groups.leases.offsets import OffsetColumn
from raymq.store.groups.leases.requests import SettleItem, offsets_of
from raymq.store.groups.transaction_requests import (
    ABORTED,
    COMMITTED,
    OffsetCommit,
    TransactionOutcome,
)
from raymq.store.state.topics import QueueKey

from .message_batcher import MessageBatcher
from .message_encoder import EncodedMessage
from .transaction_calls import CommitName, TransactionCalls
from .transaction_rows import PlacedRows, TransactionRows

_Answer = TypeVar("_Answer")

#: offsets that an error names in its text
SHOWN_MAX = 10
#: the longest time for which a commit asks
TIMEOUT_S_MAX = 86_400.0


class OffsetsHeld(Protocol):
    """Offsets of a member: `OffsetsToCommit`."""

    @property
    def shards(self) -> Mapping[QueueKey, int]: ...

    def of_shard(self, shard: int) -> list[OffsetCommit]: ...

    def committed(self) -> None: ...

    def fenced(self, keys: Iterable[QueueKey]) -> None: ...


class MemberConsumer(Protocol):
    """A member of a consumer group: `Consumer`, `AsyncConsumer`."""

    def offsets_to_commit(self, offsets: Mapping[Any, int] | None = None) -> OffsetsHeld: ...


class LeaseHolder(Protocol):
    """Where leased messages are settled: `held.LeaseOwner`."""

    shard: int

    def arguments(self) -> Mapping[str, Any]: ...


class AcksHeld(Protocol):
    """Leased messages that are to be settled: `held.HeldAcks`."""

    @property
    def owner(self) -> LeaseHolder: ...

    @property
    def item(self) -> SettleItem: ...

    def note_settled(self) -> None: ...

    def give_back(self) -> None: ...


class MayBeAcked(Protocol):
    """A `LeasedMessage`, or a `LeasedBatch` whose `hold_acks` takes a mask."""

    hold_acks: Callable[..., AcksHeld | None]


class Transaction:
    """Messages, offsets of consumers and acks of workers that count together, or not at all.

    `Producer.transaction` begins one. Nothing leaves the program before `commit`, which a `with` block calls at its
    end. An exception in the block aborts: no message is sent, offsets and leases stay as they are.

    All of it must lie on one shard. A message without a key and `queue_id` goes to the shard of what the program has
    read. Topics with the same shards and numbers of queues have a key in the same queue.

    Example:
        ```python
        import raymq

        with raymq.connect() as cluster:
            cluster.create_topic("numbers", queues=4)
            cluster.create_topic("squares", queues=4)
            with cluster.producer() as producer:
                producer.send("numbers", b"12").result(timeout=30)
                with cluster.workers("numbers", group="squarers") as workers:
                    message = workers.get(timeout=10)
                    if message is not None:
                        with message, producer.transaction() as txn:
                            txn.send("squares", b"%d" % int(message.body) ** 2)
                            txn.ack(message)
        ```

    One thread uses it at a time. It does not pickle.
    """

    def __init__(
        self,
        batcher: MessageBatcher,
        encode: Callable[..., EncodedMessage],
        calls: TransactionCalls,
        clock: Clock,
        *,
        timeout_s: float,
        after_send: Callable[[Message, Receipt | RayMQError], None] | None = None,
    ) -> None:
        """Args: `encode`: as `MessageEncoder.encode`. `after_send`: gets the outcome of each message that hooks saw."""
        check_number("timeout_s", timeout_s, 0.001, TIMEOUT_S_MAX, whole=False)
        self._encode = encode
        self._calls = calls
        self._timeout_s = timeout_s
        self._after_send = after_send

        self._rows = TransactionRows(batcher, clock)
        self._offsets: list[OffsetsHeld] = []
        self._acks: list[AcksHeld] = []
        #: the name of its commit, from then on
        self._name: CommitName | None = None
        self._placed: PlacedRows | None = None
        self._arguments: dict[str, object] = {}
        #: a call of `commit` has begun: without its answer it may count
        self._may_have_run = False
        #: None: it is not decided
        self._receipts: list[Receipt] | None = None
        self._is_over = False

    # --- parts ------------------------------------------------------------------------------------

    def send(
        self,
        topic: str | Message,
        body: object = None,
        *,
        key: bytes | None = None,
        tag: str | None = None,
        index_keys: tuple[str, ...] = (),
        properties: dict[str, str] | None = None,
        deliver_at_ms: int | None = None,
        delay_level: int = 0,
        flag: int = 0,
        sys_flag: int = 0,
        born_host: str | None = None,
        queue_id: int | None = None,
    ) -> int:
        """Send a message with the commit. Only the first send to a topic looks the topic up.

        Args:
            topic: the topic's name, or a Message, which brings all but `queue_id`.
            body: as in `Producer.send`, and so are all others.
            key: messages with one key go to one queue. Without key and `queue_id` the message goes to any queue of the
                shard where the rest of the transaction is.

        Returns: the place of its receipt in what `commit` returns.

        Raises:
            Rejected: the message cannot be stored; the transaction is over, or has more than 100,000 messages or 4 MiB
                with it (128 bytes count for each message beside its body and properties).
            Unavailable: for `max_block_ms` no shard answered the look-up of the topic.
        """
        self._check_open()
        if isinstance(topic, Message) and topic.wait_store_ok is not True:
            raise Rejected(
                "the message has wait_store_ok=False, and a commit always waits: leave it out",
                field="wait_store_ok",
                limit="True",
            )

        message = self._encode(
            topic,
            body,
            key,
            tag,
            index_keys,
            properties,
            deliver_at_ms,
            delay_level,
            flag,
            sys_flag,
            born_host,
            queue_id=queue_id,
        )
        try:
            return self._rows.add(message)
        except RayMQError as error:
            self._report(message, error)
            raise

    def commit_offsets(
        self, consumer: MemberConsumer, offsets: Mapping[Any, int] | None = None
    ) -> None:
        """Commit offsets of a consumer with the rest. Its `commit` is not needed then.

        Args:
            consumer: a member of a group.
            offsets: as of `Consumer.commit`: the NEXT offsets; None (default): after all messages that it has returned
                by now. A later call for the same queue replaces them.

        Raises:
            Rejected: the consumer is no member of a group, or the transaction is over.
            Fenced: another member has some of the queues now.
        """
        self._check_open()
        self._offsets.append(consumer.offsets_to_commit(offsets))

    def ack(self, messages: MayBeAcked, mask: Any = None) -> None:
        """Settle leased messages with the rest: they are done.

        Until then their leases are renewed as before, and `ack()` or `nack()` of them is refused.

        Args:
            messages: a `LeasedMessage` or a `LeasedBatch`.
            mask: of a batch, as of `LeasedBatch.ack`.

        Raises: Rejected: they are settled already, or the transaction is over.
        """
        self._check_open()
        held = messages.hold_acks() if mask is None else messages.hold_acks(mask)
        if held is not None:
            self._acks.append(held)

    # --- outcome ----------------------------------------------------------------------------------

    def commit(self) -> list[Receipt]:
        """Let everything count, at once. The call waits for the answer.

        Durable: as a receipt with `acks="quorum"`, also if the producer has `acks="leader"`. A call whose answer was
        lost is repeated for `timeout_s` at most, also at another leader: it is done once.

        Returns: the receipt of each message, in the order of the sends. A second call returns them again.

        Raises:
            Fenced: a member has lost a queue, or a worker a lease; `offsets` names the messages, `queues` the queues.
                Nothing of the transaction counts.
            Rejected: its parts lie on several shards, which are named, or a shard refuses a message. Nothing counts.
            CommitUnknown: no shard has said within `timeout_s` whether it is committed. Call `commit` again, which asks
                again, or `abort`. Until then its messages stay leased.
            Unavailable: no shard takes it at present. StorageFull: the disk is full. Nothing counts.
        """
        if self._receipts is not None:
            return self._receipts
        self._check_not_over()
        if self._name is None:
            try:
                self._begin_commit()
            except BaseException as error:
                self._end_aborted(error)
                raise
        name = self._name
        if name is None:
            self._is_over = True
            self._receipts = []
            return self._receipts

        may_have_run, self._may_have_run = self._may_have_run, True
        try:
            outcome = self._calls.commit(
                name, self._arguments, self._timeout_s, may_have_run=may_have_run
            )
        except CommitUnknown:
            raise
        except RayMQError as error:
            self._end_aborted(error)
            raise
        return self._take(outcome)

    def abort(self) -> None:
        """Drop everything: no message is sent, offsets stay, and leased messages may be settled otherwise.

        A second call does nothing. After a CommitUnknown it asks the shard to let the transaction be aborted, unless it
        is committed. The position of a consumer stays where it is: `seek` to `committed()` reads again.

        Raises:
            Rejected: the transaction is committed.
            CommitUnknown: no shard has said within `timeout_s` what counts.
        """
        if self._receipts is not None:
            raise _committed()
        if self._is_over:
            return
        name = self._name
        if name is None:
            self._end_aborted(_aborted())
            return
        outcome = self._calls.abort(name, self._timeout_s)
        if outcome.decision == COMMITTED:
            self._take(outcome)
            raise _committed()
        self._end_aborted(_aborted())

    def _begin_commit(self) -> None:
        """Give it a name, unless it is empty. Raises: Rejected if it lies on several shards."""
        shards = self._shards()
        if not shards:
            return
        (shard,) = shards
        placed = self._placed = self._rows.place(shard)
        self._arguments = {"parts": [list(part) for part in placed.parts]}
        if placed.batch is not None:
            self._arguments["rows"] = pack_rows(placed.batch)
        if self._offsets:
            self._arguments["offsets"] = [
                pack_offset_commit(each) for each in _joined(self._offsets, shard)
            ]
        if self._acks:
            self._arguments["acks"] = _packed_acks(self._acks)
        self._name = self._calls.take(shard)

    def _shards(self) -> dict[int, str]:
        """The shard of the transaction, with one of its parts; empty: it has none. Raises: Rejected for several."""
        found = self._rows.shards()
        for held in self._acks:
            topic, queue_id = held.item.key
            found.setdefault(held.owner.shard, f"leased messages of queue {queue_id} of {topic}")
        for offsets in self._offsets:
            for (topic, queue_id), shard in offsets.shards.items():
                found.setdefault(shard, f"offsets of queue {queue_id} of {topic}")

        free = self._rows.free_topics()
        if not found and free:
            common = set.intersection(*(set(route.shards) for route in free.values()))
            if common:
                return {random.choice(sorted(common)): "messages"}
        for name, route in free.items():
            if not any(shard in found for shard in route.shards):
                found.setdefault(route.shards[0], f"messages for {name}")
        if len(found) > 1:
            raise _several(found)
        return found

    # --- end --------------------------------------------------------------------------------------

    def _take(self, outcome: TransactionOutcome) -> list[Receipt]:
        """Do what a decision asks for. Returns: the receipts. Raises: why it was refused."""
        if outcome.decision == COMMITTED and self._placed is not None:
            self._is_over = True
            self._receipts = self._placed.receipts(outcome)
            for acks in self._acks:
                acks.note_settled()
            for offsets in self._offsets:
                offsets.committed()
            for message, receipt in zip(self._rows.messages, self._receipts, strict=True):
                self._report(message, receipt)
            return self._receipts

        error = _aborted() if outcome.decision == ABORTED else _fenced(outcome)
        fenced = [(topic, int(queue_id)) for _, topic, queue_id, *_ in outcome.fenced]
        for offsets in self._offsets:
            offsets.fenced(fenced)
        self._end_aborted(error)
        raise error

    def _end_aborted(self, error: BaseException) -> None:
        """Nothing of it counts. Args: `error`: what hooks get."""
        self._is_over = True
        for acks in self._acks:
            acks.give_back()
        shown = error if isinstance(error, RayMQError) else _aborted()
        for message in self._rows.messages:
            self._report(message, shown)

    def _report(self, message: EncodedMessage, outcome: Receipt | RayMQError) -> None:
        if message.hooked is not None and self._after_send is not None:
            self._after_send(message.hooked, outcome)

    def _check_open(self) -> None:
        """Raises: Rejected when nothing can be added any more."""
        self._check_not_over()
        if self._name is not None:
            raise Rejected(
                "the transaction is being committed: call commit() again, or abort()",
                field="transaction",
                limit="before commit",
            )

    def _check_not_over(self) -> None:
        if self._is_over:
            ended = "aborted" if self._receipts is None else "committed"
            raise Rejected(
                f"the transaction is {ended}: begin another one",
                field="transaction",
                limit="open",
                found=ended,
            )

    def __enter__(self) -> Transaction:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_over:
            return
        if kind is None:
            self.commit()
        else:
            # The program hears of its own error.
            with contextlib.suppress(RayMQError):
                self.abort()


class AsyncTransaction:
    """A transaction of an `AsyncProducer`: the methods of `Transaction`, awaited where they wait.

    Example:
        ```python
        import asyncio

        import raymq

        async def main() -> None:
            with raymq.connect() as cluster:
                cluster.create_topic("numbers", queues=4)
                cluster.create_topic("squares", queues=4)
                async with cluster.async_producer() as producer:
                    await producer.send("numbers", b"12")
                    async with cluster.async_workers("numbers", group="squarers") as workers:
                        message = await workers.get(timeout=10)
                        if message is not None:
                            async with message, producer.transaction() as txn:
                                await txn.send("squares", b"%d" % int(message.body) ** 2)
                                txn.ack(message)

        asyncio.run(main())
        ```

    One task uses it at a time. A cancelled `commit` goes on in its thread: call it again, or `abort`.
    """

    def __init__(self, transaction: Transaction, look_up: Callable[[str], object]) -> None:
        """Args: `look_up`: looks a topic up. It may wait for a shard, and raise as `Transaction.send`."""
        self._transaction = transaction
        self._look_up = look_up
        self._known: set[str] = set()
        #: one call at a time reaches the transaction
        self._lock = asyncio.Lock()

    async def send(self, topic: str | Message, body: object = None, **fields: Any) -> int:
        """As `Transaction.send`, with its arguments. Only the first send to a topic waits."""
        name = topic.topic if isinstance(topic, Message) else topic
        async with self._lock:
            if name not in self._known:
                await self._in_thread(partial(self._look_up, name))
                self._known.add(name)
            # In the event loop, as hooks and codecs of the producer are.
            return self._transaction.send(topic, body, **fields)

    def commit_offsets(
        self, consumer: MemberConsumer, offsets: Mapping[Any, int] | None = None
    ) -> None:
        """As `Transaction.commit_offsets`, of an `AsyncConsumer` or a `Consumer`."""
        self._transaction.commit_offsets(consumer, offsets)

    def ack(self, messages: MayBeAcked, mask: Any = None) -> None:
        """As `Transaction.ack`, of messages of `AsyncWorkers` or `Workers`."""
        self._transaction.ack(messages, mask)

    async def commit(self) -> list[Receipt]:
        """As `Transaction.commit`."""
        async with self._lock:
            return await self._in_thread(self._transaction.commit)

    async def abort(self) -> None:
        """As `Transaction.abort`."""
        async with self._lock:
            await self._in_thread(self._transaction.abort)

    async def _in_thread(self, call: Callable[[], _Answer]) -> _Answer:
        task = asyncio.ensure_future(asyncio.to_thread(call))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            # The next call must not come before its end.
            with contextlib.suppress(Exception):
                await task
            raise

    async def __aenter__(self) -> AsyncTransaction:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        async with self._lock:
            await self._in_thread(lambda: self._transaction.__exit__(kind, error, trace))


def _joined(held: Sequence[OffsetsHeld], shard: int) -> list[OffsetCommit]:
    """The offsets of all calls, each group and topic once. The last one of a queue counts."""
    found: dict[tuple[str, str], dict[int, Commit]] = {}
    for each in held:
        for group, topic, commits in each.of_shard(shard):
            found.setdefault((group, topic), {}).update(commits)
    return [OffsetCommit(*names, commits) for names, commits in found.items()]


def _packed_acks(held: Sequence[AcksHeld]) -> list[dict[str, object]]:
    """The acks of all calls as a shard takes them: each group once, and in it each lease and queue."""
    arguments: dict[str, Mapping[str, Any]] = {}
    offsets: dict[str, dict[tuple[int, QueueKey], list[OffsetColumn]]] = {}
    for each in held:
        named, item = each.owner.arguments(), each.item
        group = str(named["group"])
        arguments.setdefault(group, named)
        own = offsets.setdefault(group, {})
        own.setdefault((item.number, item.key), []).append(item.offsets)

    return [
        pack_acks(
            [
                SettleItem(*lease, offsets_of(np.concatenate(found)), SettleOutcome.ACKED)
                for lease, found in own.items()
            ],
            arguments[group],
        )
        for group, own in offsets.items()
    ]


def _several(shards: Mapping[int, str]) -> Rejected:
    parts = "; ".join(f"{what} on shard {shard}" for shard, what in sorted(shards.items()))
    return Rejected(
        f"the transaction has parts on {len(shards)} shards, and must lie on one: {parts}. Send messages without key "
        "and queue_id, which go where the rest is; or give topics the same shards and numbers of queues, so that a key "
        "is in the same place in both; and commit for the messages of each shard",
        field="transaction",
        limit="one shard",
        found=sorted(shards),
    )


def _fenced(outcome: TransactionOutcome) -> Fenced:
    """Why a transaction was refused."""
    queues = [(topic, int(queue_id)) for _, topic, queue_id, *_ in outcome.fenced]
    offsets = [
        (topic, int(queue_id), offset)
        for _, _, topic, queue_id, packed in outcome.lost
        for offset in check_packed_offsets("lost", packed).tolist()
    ]

    groups = sorted({each[0] for each in (*outcome.fenced, *outcome.lost)})
    why = [f"another member has queue {queue} of {topic} now" for topic, queue in queues]
    why += [
        f"the lease of message {each[2]} of queue {each[1]} of {each[0]} is over"
        for each in offsets
    ]
    more = f" and {len(why) - SHOWN_MAX} more" if len(why) > SHOWN_MAX else ""
    return Fenced(
        f"nothing of the transaction counts, since others of group {' and '.join(groups)} took over: "
        f"{', '.join(why[:SHOWN_MAX])}{more}",
        group=groups[0] if groups else "",
        queues=queues,
        offsets=offsets,
    )


def _aborted() -> Rejected:
    return Rejected(
        "the transaction was aborted: nothing of it counts", field="transaction", limit="open"
    )


def _committed() -> Rejected:
    return Rejected(
        "the transaction is committed", field="transaction", limit="not committed", found=COMMITTED
    )
