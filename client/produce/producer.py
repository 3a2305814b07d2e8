"""The blocking producer."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from concurrent.futures import Future

import pyarrow as pa
from typing_extensions import Unpack

from raymq.client.arguments import takes_options_of
from raymq.client.handle import ClusterHandle
from raymq.client.hooks import Hooks
from raymq.client.messages.message import Message, Receipt
from raymq.client.unclosed import OpenClient
from raymq.store.base.clock import Clock
from raymq.store.base.errors import RayMQError, Rejected
from raymq.store.config.promise import Acks

from .cancel_timer import cancel_timer
from .half_checks import CheckCallback, HalfChecks
from .half_message import HalfMessage
from .half_sender import HalfSender
from .hooked_sends import HookedSends
from .message_batcher import MessageBatcher
from .producer_config import ProducerConfig, ProducerOptions
from .queue_sequence import BatchReceipt
from .send_future import BatchFuture, SendFuture
from .transaction import Transaction
from .transaction_calls import TransactionCalls

#: how long the end of a with block waits for receipts after an exception in the block
FAILED_EXIT_S = 2.0


class Producer(OpenClient):
    """Sends messages in batches, and gives each message a future of its receipt.

    `send` returns at once. A message leaves at once when nothing is under way to its shard. Otherwise the producer
    collects messages per queue until their batch is full, `linger_ms` is over, or the shard has answered everything
    that was sent before.

    Threads may share a producer. As a context manager a producer flushes at the end, and raises the first failure that
    no caller has seen. After an exception in the block it waits at most 2 s for receipts. A program that ends without
    `close` waits 5 s, and one line on stderr says how many messages have no receipt then. A producer neither pickles
    nor survives a fork, so pickle the Cluster instead.

    Example:
        ```python
        import raymq

        with raymq.start("raymq-data") as cluster:
            cluster.create_topic("orders", queues=4)
            with cluster.producer(acks="quorum", linger_ms=5) as producer:
                futures = [producer.send("orders", b"order %d" % n, key=b"alice") for n in range(100)]
                print(futures[0].result(timeout=30).offset)
        ```

    Args:
        cluster: the cluster to send to. `cluster.producer(...)` is the same call.
        acks: "quorum" (default): a receipt comes after a majority of the replicas has the message, as durably as the
            cluster's flush mode says. Of two replicas that is both. "leader": after the leader alone has it; quicker,
            but the followers may lack the message. `send` can choose for each message.
        linger_ms: milliseconds (default 5) that a message waits at most for others in its batch, while earlier batches
            are under way to its shard. 0 sets no such limit: it leaves with the answer to them, with a full batch, or
            at `flush`.
        batch_bytes: bytes (default 1 MiB) at which a batch is sent at once. Larger batches cost less per message and
            more memory and latency.
        buffer_bytes: bytes (default 64 MiB) of messages without a receipt, and so the memory of the producer. `send`
            blocks while the buffer is full.
        max_block_ms: milliseconds (default 60,000) that `send` waits for room in the buffer, or for an answer to the
            first look-up of a topic. Then it raises Unavailable.
        delivery_timeout_ms: milliseconds (default 120,000) from the moment a batch is closed (full, answered, or
            lingered long enough) until it fails without a receipt. A shorter time fails sends that a restart of the
            shard would have completed.
        request_timeout_ms: milliseconds (default 30,000) of silence after which the producer connects to the shard
            again and resends. A time below that of a slow sync costs needless resends.
        in_flight_bytes: bytes (default 16 MiB) under way to one shard. With less than 4 MiB the disk waits for batches.
        codec: makes bodies of values: "bytes" (default), "json", "msgpack" or "arrow-ipc". Its name travels in the
            property `content-type`, which costs about 20 bytes per message unless it is "bytes".
        max_message_bytes: bytes (default 4 MiB) of the largest body that `send` accepts. A cluster takes 4 MiB, or
            what its option of the same name says, at most 32 MiB.
        hooks: objects that see each message of `send` and `send_many`; default: none. A hook may have the methods
            `before_send(message)`, which may return another Message to send, and `after_send(message, receipt, error)`:
            either `receipt` or `error` is None. What a hook raises is logged and counted, and the message is sent. With
            hooks each message costs about 30 us more.
        clock: replaces the system's clock in tests.

    Guarantees:
        Messages of one queue keep the order of the `send` calls, even across resends.

        A batch without a receipt is sent again with the same sequence numbers until `delivery_timeout_ms` is over, so
        that it is stored once.

        A receipt means that the promise of `acks` was kept. `statistics` counts messages, batches and their times.

    Raises:
        Rejected: at once, for an unknown option value or a message that cannot be stored. From a future, for a message
            that the shard refuses; the other messages of its batch are stored. Each refusal costs a round trip.
        Unavailable: nothing was stored. `send` raises it when the buffer stays full, a future when its time is up.
        DeliveryUnknown: from a future; the message may be stored, and `resend` continues from there. `status` is the
            shard's last one (FLUSH_SLAVE_TIMEOUT: too few followers answer), or UNKNOWN_ERROR when the shard gave none.
        StorageFull: from a future, after about 2 s: the shard's disk is full, nothing was stored.
    """

    made_as = ("producer", "producer")

    @takes_options_of(ProducerConfig)
    def __init__(
        self,
        cluster: ClusterHandle,
        *,
        clock: Clock | None = None,
        **options: Unpack[ProducerOptions],
    ) -> None:
        self._batcher = MessageBatcher(cluster, clock=clock, **options)
        self.config = self._batcher.config
        self._encode = self._batcher.encoder.encode
        self._hooked: HookedSends | None = None
        hooks = Hooks.of(self.config.hooks)
        if hooks is not None:
            self._hooked = HookedSends(self._batcher.encoder, hooks)
            self._encode = self._hooked.encode
        self._cluster = cluster
        clock = clock or Clock()
        self._halves = HalfSender(cluster, self._batcher, clock)
        self._checks = HalfChecks(self._halves, clock, cluster.transport)
        self._clock = clock
        self._commits = TransactionCalls(lambda: self._halves.routes, clock)
        # The thread of the checks must not outlive a producer that nothing refers to.
        weakref.finalize(self, self._checks.stop)

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
        wait_store_ok: bool = True,
        queue_id: int | None = None,
        acks: Acks | None = None,
    ) -> SendFuture:
        """Send one message and return at once. Only the first send to a topic looks the topic up.

        Args:
            topic: the topic's name, or a Message, which brings all but `queue_id` and `acks`.
            body: a value that the producer's codec encodes; bytes by default. With bytes None is a null value, if the
                topic allows it. Other codecs encode None. If the topic has a schema, the body must be a JSON object of
                its columns, and the check costs 60 to 95 us: `send_batch` costs 1 us a row.
            key: messages with one key go to one queue. Without key and `queue_id`, messages fill a batch of one queue,
                then of the next.
            tag: a word that readers see, and by which they may filter.
            index_keys: words by which the message can be found.
            properties: names and values that travel with the message.
            deliver_at_ms: milliseconds since 1970, at most three days ahead. A time before 2001 is refused. Readers of
                the queue get the message once, in the second after that time and at a new offset. The receipt means
                that the message is kept until then, and names the topic and offset where. Messages of one queue come
                in the order of their times.
            delay_level: 1 to 18 instead of a time: one of RocketMQ's delays, from 1 s to 2 h, as with its
                `setDelayTimeLevel`. Higher ones are the highest one. 0: none.
            flag: a number of 32 bits that readers see, RocketMQ's flag.
            sys_flag: RocketMQ's sysFlag: 1 for a compressed body, with 0x100 (LZ4), 0x200 (ZSTD) or 0x300 (ZLIB), and 2
                for several tags. Other bits are refused. RayMQ compresses and decompresses nothing.
            born_host: address and port of the message's first sender, such as "192.0.2.1:5000", for a program that
                sends for others. By default the shard takes those of the producer's connection.
            wait_store_ok: False: the receipt says only that the leader has the message in memory, whatever flush mode,
                replicas and the producer's `acks` are, as RocketMQ's `setWaitStoreMsgOK(false)`. It comes that early
                if all messages of the batch say so, else with the batch. Not together with `acks` of the call.
            queue_id: the queue; otherwise `key` decides.
            acks: of this message, by default the producer's. A batch has one value, so changing it often makes small
                batches.

        Returns: a future of the receipt.

        Raises:
            Rejected: the message cannot be stored, or the producer is closed.
            Unavailable: for `max_block_ms` the buffer was full, or no shard answered the look-up.
        """
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
            wait_store_ok,
            queue_id,
            acks,
        )
        if self._hooked is not None:
            return self._hooked.send(message, self._batcher.send)
        return self._batcher.send(message)

    def send_many(
        self, messages: Iterable[Message], *, queue_id: int | None = None, acks: Acks | None = None
    ) -> list[SendFuture]:
        """Send messages together and return at once. Each is quicker than a `send`, and batches are fewer and larger.

        Args: `messages`: of any topics, in order. `queue_id`, `acks`: of all of them, as in `send`.
        Returns: one future per message, as `send` returns it. If the buffer stays full for `max_block_ms` in the
        middle, the futures of all messages from there on raise Unavailable.
        Raises: Rejected for a message that cannot be stored, Unavailable as `send`; then none of them is sent.

        Example:
            ```python
            import raymq

            with raymq.connect() as cluster, cluster.producer() as producer:
                cluster.create_topic("orders", queues=4)
                orders = [raymq.Message(topic="orders", body=b"order %d" % n) for n in range(100)]
                futures = producer.send_many(orders)
                print(futures[-1].result(timeout=30).offset)
            ```
        """
        if self._hooked is not None:
            hooked = self._hooked.encode_all(messages, queue_id=queue_id, acks=acks)
            return self._hooked.send_many(hooked, self._batcher.send_many)
        encode = self._encode
        encoded = [encode(each, queue_id=queue_id, acks=acks) for each in messages]
        return self._batcher.send_many(encoded)

    def send_batch(
        self, topic: str, data: pa.RecordBatch | pa.Table, *, queue_id: int | None = None
    ) -> list[Future[BatchReceipt]]:
        """Send columns of messages, without a Python object per message.

        Args: `data`: has the column `body` and may have `key`, `tag`, `properties` and `born_time_ms`. If the topic has
        a schema, its columns take the place of `body`. A null `body`, or a row of nothing but nulls, is a null value.
        Rows go to `queue_id`, else to the queue of their key. Without keys all rows go to one queue.
        Returns: one future per batch, of about 4 MiB or of one row. Rows of one queue keep their order, and come after
        earlier sends. If the buffer stays full for `max_block_ms` in the middle, the futures of all batches from there
        on raise Unavailable.
        Raises: Rejected naming the column, or the row that cannot be stored; Unavailable as `send`. Then nothing is
        sent.
        """
        return list(self._batcher.add_columns(topic, data, queue_id))

    def cancel(self, receipt: Receipt) -> bool:
        """Cancel a message of `send(deliver_at_ms=...)` before it is delivered. Any producer of the cluster may do it.

        Example:
            ```python
            import time
            import raymq

            with raymq.connect() as cluster, cluster.producer() as producer:
                cluster.create_topic("orders", queues=4)
                in_an_hour = int(time.time() * 1000) + 3_600_000
                receipt = producer.send("orders", b"reminder", deliver_at_ms=in_an_hour).result(timeout=30)
                print(producer.cancel(receipt))
            ```

        Args:
            receipt: that of the send.

        Returns: True: the message is never delivered, also after failures, and a repeated call says so again.
        False: too late; readers have the message, or get it within about a second.
        Durable: as an acknowledged message.

        Raises:
            Rejected: the message waits for a delay level, came as a row of `send_batch`, or its receipt has no offset.
            Unavailable: the shard does not answer, or is loading its timers. Nothing was cancelled.
            DeliveryUnknown: the message may be cancelled. The same call says whether it is.
        """
        return cancel_timer(self._cluster, receipt)

    def resend(self, sent: SendFuture) -> SendFuture:
        """Send again a message whose future raised DeliveryUnknown, with the same sequence number.

        A shard that has stored the message answers with its receipt (`duplicate`). Otherwise the shard stores it now,
        after the messages sent since. The messages of one batch go together, so a second call for one of them sends
        nothing. Messages of one queue must be sent again in the order of their sends, because the shard refuses gaps.
        Any producer of the same cluster may do it, even when the first one is closed.

        Returns: a future of the receipt. It may raise DeliveryUnknown once more.
        Raises: Rejected for a message that is under way, stored, or certainly not stored: `send` the latter.
        """
        return SendFuture(self._batcher.resend(sent._batch, sent._row), sent._row)

    def resend_batch(self, sent: Future[BatchReceipt]) -> Future[BatchReceipt]:
        """Like `resend`, for a future of `send_batch`."""
        if not isinstance(sent, BatchFuture):
            raise Rejected(
                "this is not a future of send_batch", field="sent", limit="a future of send_batch"
            )
        return self._batcher.resend(sent)

    # --- transactions -----------------------------------------------------------------------------

    def send_half(
        self,
        topic: str | Message,
        body: object = None,
        *,
        group: str,
        key: bytes | None = None,
        tag: str | None = None,
        index_keys: tuple[str, ...] = (),
        properties: dict[str, str] | None = None,
        flag: int = 0,
        sys_flag: int = 0,
        born_host: str | None = None,
        queue_id: int | None = None,
    ) -> Future[HalfMessage]:
        """Store a half message, which no consumer sees before its commit, and return at once.

        The usual order of a transaction: send the half message, do the work (such as a commit of a database), and then
        commit or roll back the half message. If the program dies in between, `check` asks the program that comes next.

        Example:
            ```python
            import raymq

            with raymq.connect() as cluster, cluster.producer() as producer:
                cluster.create_topic("orders", queues=4)
                half = producer.send_half("orders", b"one espresso", key=b"alice", group="billing").result(timeout=30)
                paid = True  # here the program does its own work
                if paid:
                    half.commit()
                else:
                    half.rollback()
            ```

        Args:
            topic: the topic's name, or a Message. A compacted topic is refused, and so is a Message that is delayed.
            body: as in `send`, and so are `key`, `tag`, `index_keys`, `properties`, `flag`, `sys_flag`, `queue_id`.
            group: the producer group, a name of letters, digits and %|_-. Its producers are those who may end the half
                message, and those who are asked about it.
            born_host: address and port of the message's first sender; by default the shard's own.

        Returns: a future of the half message. Its result means what a receipt with `acks="quorum"` means, also if the
        producer has `acks="leader"`: a majority of the replicas has it, as durably as the cluster's flush mode says.
        Half messages keep no order, neither among each other nor with other sends. Hooks do not see them.

        If an answer is lost, the producer asks again, for `delivery_timeout_ms` at most. The shard knows that request
        by a key, so that it stores one half message, as long as this one is open. A check may end it before the
        request comes again, 6 s after it was stored at the earliest. Then the shard stores a second one, which is
        asked about like the first one.

        Raises:
            Rejected: at once, for a message that cannot be stored, or when the producer is closed. From the future, if
                the shard refuses it.
            Unavailable: at once, if the buffer is full or no shard answers the look-up of the topic for `max_block_ms`.
                From the future: nothing was stored. Also while 262,144 half messages are open on the shard.
            DeliveryUnknown: from the future; the half message may be stored. If it is, its producers are asked about
                it. `resend` does not take it.
            StorageFull: from the future; nothing was stored.
        """
        return self._halves.send(
            topic,
            body,
            group=group,
            key=key,
            tag=tag,
            index_keys=index_keys,
            properties=properties,
            flag=flag,
            sys_flag=sys_flag,
            born_host=born_host,
            queue_id=queue_id,
        )

    def transaction(self, *, timeout_s: float = 60.0) -> Transaction:
        """Begin a transaction: messages, offsets of consumers and acks of workers that count together, or not at all.

        Example:
            ```python
            import raymq

            with raymq.connect() as cluster, cluster.producer() as producer:
                cluster.create_topic("debits", queues=4)
                cluster.create_topic("credits", queues=4)
                with producer.transaction() as txn:
                    txn.send("debits", b"10", key=b"alice")
                    txn.send("credits", b"10", key=b"alice")
            ```

        Args:
            timeout_s: seconds (default 60) for which `commit` asks for its outcome before it raises CommitUnknown.

        Returns: an open transaction. It leaves nothing on any shard before its commit, and need not be ended. Threads
        may have one each. The options of the producer that are about batches do not matter to it.

        Raises: Rejected for a wrong option, and when the producer is closed.
        """
        self._halves.check_open()
        after_send = None if self._hooked is None else self._hooked.hooks.after_send
        return Transaction(
            *(self._batcher, self._encode, self._commits, self._clock),
            timeout_s=timeout_s,
            after_send=after_send,
        )

    def end_half(self, half_id: str, decision: str) -> bool:
        """Commit or roll back a half message by its id. Any producer of the cluster may do it, in any process.

        The call waits for the answer, and is repeated for `delivery_timeout_ms` at most if none comes. The first
        decision counts. It may be repeated at any time.

        Args:
            half_id: the `id` of a `HalfMessage`, or of one that a check has named.
            decision: "commit" or "rollback".

        Returns: True: this call has ended it. False: it had been ended in the same way before, by another call or by a
        try of this one whose answer was lost.
        Durable: as an acknowledged message.

        Raises:
            Rejected: the other decision counts, or it was given up after too many checks; `found` names what counts.
                Also for an id of another cluster, and when the topic was deleted.
            Unavailable: no shard answered. Nothing was changed.
            DeliveryUnknown: the decision may be stored. The same call again says whether it is.
        """
        return self._halves.end(half_id, decision)

    def check(self, callback: CheckCallback, *, group: str) -> None:
        """Answer for half messages of a producer group that no decision has come for, from now until `close`.

        The shards ask 6 s after a half message was stored (or as its property CHECK_IMMUNITY_TIME_IN_SECONDS says) and
        then every 30 s, each time one producer of the group, of RayMQ's or RocketMQ's clients. Both answer for both.
        After 15 times it is given up and moves to the topic TRANS_CHECK_MAX_TIME_TOPIC. While no producer of the group
        runs, nothing is counted.

        Example:
            ```python
            import raymq

            def is_paid(half) -> str | None:
                return "commit" if half.key == b"alice" else None  # a program looks into its database

            with raymq.connect() as cluster, cluster.producer() as producer:
                producer.check(is_paid, group="billing")
            ```

        Args:
            callback: gets a `CheckedHalf`, which has the fields of the message and its `id`. It returns "commit",
                "rollback", or None as long as it does not know; then it is asked again later. Calls come from a thread
                of the producer, one at a time. One that takes longer than a few seconds makes others wait, and the
                shard may ask another producer meanwhile. What it raises is logged, and counts as None.
            group: the producer group. A second call for one group replaces its callback.

        Raises: Rejected for a name that no group has, for what cannot be called, and when the producer is closed.
        """
        self._checks.add(group, callback)

    @property
    def hook_failures(self) -> int:
        """How many calls of `hooks` raised. The first one of each kind was logged."""
        return 0 if self._hooked is None else self._hooked.hooks.failures.count

    def statistics(self) -> dict[str, int | float]:
        """Count the messages so far, their batches and their times.

        Answered messages: `messages`, `batches`, `bytes` (bodies, properties and 128 bytes for each message), and
        `failed_messages`, those without a receipt. Means: `batch_messages_mean`, `batch_bytes_mean`, `queue_ms_mean`
        (from a batch's first message until it is closed) and `ack_ms_mean` (from there to the answer). At this moment:
        `open_batches`, `under_way_batches`, `buffered_bytes`. Half messages count in the last two alone.
        """
        return self._batcher.statistics()

    def flush(self, timeout: float | None = None) -> None:
        """Send all open batches and wait up to `timeout` seconds until every send so far has an outcome.

        Raises: the first failure that no caller has seen; TimeoutError when the time is up. Rejected in a done
        callback.
        """
        self._batcher.flush(timeout)
        self._batcher.batch_sender.raise_failure()

    def close(self, timeout: float | None = None) -> None:
        """Flush for up to `timeout` seconds, then close. Sends without a receipt fail. A second call does nothing.

        No callback of `check` begins any more; one that runs is waited for, with RayMQ's own transport for 2 s at most.
        In a done callback it does not flush. In a forked child it does nothing.
        Raises: the first failure that no caller has seen; the producer is closed in any case.
        """
        if not self._batcher.closed and self._batcher.batch_sender.in_own_process:
            self._checks.close()
            try:
                self._batcher.close(timeout)
            finally:
                self._halves.close()
            self._batcher.batch_sender.raise_failure()

    def __enter__(self) -> Producer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        try:
            self.close(None if kind is None else FAILED_EXIT_S)
        except RayMQError:
            # A failure of the block itself must not be hidden by one that it caused.
            if kind is None:
                raise
