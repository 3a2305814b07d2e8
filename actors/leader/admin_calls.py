"""The administrative operations of a leader, which `call` runs. Each `_op_NAME` is the operation NAME.

Operations that any replica answers are in `ReplicaOperations`.
"""

from __future__ import annotations

from typing import Any, Protocol

from raymq.actors.api import call_arguments
from raymq.actors.shared.maintenance import Maintenance
from raymq.store.base.errors import OffsetOutOfRange, Rejected, Unavailable
from raymq.store.base.format import TIMER_TOPIC
from raymq.store.engine.message_store import MessageStore
from raymq.store.put.inner_message import ServiceProgress
from raymq.store.records.producer_stamp import EPOCH_MAX, PRODUCER_MAX
from raymq.store.records.requests import AppendedRows
from raymq.store.services import staged_rows, stream_batches, write_decisions
from raymq.store.services.retry import send_back
from raymq.store.services.stream_batches import StreamBatch
from raymq.store.state.shard_state import SHARDS, UNCLEAN_RECOVERIES, TopicInfo
from raymq.store.state.topics import QUEUES_MAX, is_system_topic

#: how long one call publishes staged rows
PUBLISH_MS = 500


class AdminHost(Protocol):
    """The part of `leader.Leader` that the operations use."""

    store: MessageStore

    @property
    def maintenance(self) -> Maintenance:
        """The maintenance loop of the process."""

    def identity(self) -> dict[str, Any]:
        """Cluster id, shard and other facts."""

    def check_serving(self) -> None:
        """Raises: Unavailable, when the shard takes no writes."""

    def hand_over(self, replica: int) -> None:
        """Let another replica lead soon. Raises: Rejected when it cannot."""

    @property
    def visible_end(self) -> int:
        """The physical offset below which readers see topics and offsets."""

    def await_check(self) -> None:
        """Wait until a majority says that no other replica led at this call. Raises: Unavailable."""

    def await_dispatch(self) -> None:
        """Wait until readers see all messages confirmed by now. Raises: Unavailable."""

    def publish(self, appended: AppendedRows) -> None:
        """Let the satellites work on an append, without waiting for them."""

    def await_promise(self, appended: AppendedRows) -> None:
        """Wait until the promise of this append is kept. Raises: DeliveryUnknown."""


class AdminCalls:
    """Topics, offsets, producers and facts of one leader. Callers: any thread."""

    def __init__(self, host: AdminHost) -> None:
        self._host = host

    def call(self, op: str, args: dict[str, Any]) -> dict[str, Any]:
        """An administrative operation.

        Raises: Rejected for an unknown operation or bad arguments.
        """
        handler = getattr(self, f"_op_{op}", None)
        if handler is None:
            raise Rejected(f"unknown operation {op!r}", field="op", limit="a known operation")
        try:
            result: dict[str, Any] = handler(**args)
        except OSError as error:
            # The operation's record could not be appended.
            raise Unavailable(f"{op}: {error}", field="store") from error
        return result

    def _op_move_leader(self, replica: int) -> dict[str, Any]:
        """Let another replica lead, once its log has all of this one."""
        self._host.check_serving()
        self._host.hand_over(replica)
        return {}

    def _op_note_unclean_recovery(self, facts: dict[str, Any]) -> dict[str, Any]:
        """Write into the log what an operator gave up. Args: `facts`: as of `cluster.recover_shard`."""
        self._host.check_serving()
        key = str(call_arguments.check_integer("at_ms", facts["at_ms"], 0))
        known = self._host.store.state.progress.get(UNCLEAN_RECOVERIES, {})
        if key not in known:
            store = self._host.store
            store.put_inner([], progress=ServiceProgress(UNCLEAN_RECOVERIES, {key: facts}))
            # Not awaited: as long as the successors copy the log, no majority confirms anything.
            self._host.publish(AppendedRows.up_to(store.log.end))
        return {}

    def _op_note_shards(self, known: int, joined: int) -> dict[str, Any]:
        """Note in the log that the cluster has more shards. Returns: all topics that were created before that.

        Args: `known`: so many exist. `joined`: so many know every topic. From now on each answer to `create_topic`
        names that number, so that its caller creates the topic there, too.
        """
        host = self._host
        host.check_serving()
        call_arguments.check_integer("known", known, 1, call_arguments.SHARDS_MAX)
        call_arguments.check_integer("joined", joined, 1, known)
        noted = host.store.state.progress.get(SHARDS, {})
        wanted = {
            name: max(number, noted.get(name, 0))
            for name, number in (("known", known), ("joined", joined))
        }
        if wanted != noted:
            host.store.put_inner([], progress=ServiceProgress(SHARDS, wanted))

        # The record of an earlier call may still wait for a follower that is away, and so may topics.
        host.await_promise(AppendedRows.up_to(host.store.log.end))
        topics = {
            info.name: {
                "queues": info.queues,
                "shards": list(info.shards),
                "attributes": dict(info.attributes),
                "former_queues": list(info.former_queues),
                "hidden_queues": info.hidden_queues,
            }
            for info in list(host.store.state.topics.values())
            if not is_system_topic(info.name)
        }
        return {"topics": topics}

    def _op_delete_expired_files(self) -> dict[str, Any]:
        """Delete expired files now. Source: TRIGGER_DELETE_FILES (27)."""
        self._host.maintenance.delete_now()
        return {}

    def _op_create_topic(
        self,
        name: str,
        queues: int,
        shards: list[int],
        attributes: dict[str, str] | None = None,
        on_all: bool = False,
        former_queues: list[int] | None = None,
        hidden_queues: int = 0,
    ) -> dict[str, Any]:
        """Create a topic.

        Args: `on_all`: a new one must be on all shards. `former_queues`, `hidden_queues`: of a topic that has got
        queues on other shards. Raises: Rejected naming the shards, for a caller that is older.
        """
        self._host.check_serving()
        call_arguments.check_name("topic", name)
        joined = list(range(int(self._host.identity().get("shards", 1))))
        if on_all and name not in self._host.store.state.topics and shards != joined:
            raise Rejected(
                f"a new topic is on the shards {joined} now", field="shards", limit=joined
            )

        appended = self._host.store.create_topic(
            call_arguments.check_name("topic", name),
            call_arguments.check_integer("queues", queues, 1, QUEUES_MAX),
            call_arguments.check_shards(shards, self._known_shards()),
            call_arguments.check_attributes(attributes),
            former_queues=tuple(
                call_arguments.check_integer("former_queues", each, 1, queues)
                for each in former_queues or ()
            ),
            hidden_queues=call_arguments.check_integer(
                "hidden_queues", hidden_queues, 0, queues - 1
            ),
        )

        # The record of a topic that exists may still wait for its flush, or for a follower that is away.
        end = self._host.store.topic_end(name)
        self._host.await_promise(appended or AppendedRows.up_to(end))
        # Read after the append: `note_shards` has returned this topic, or its number is in this answer.
        return {"created": appended is not None, "shards": self._host.identity().get("shards", 1)}

    def _known_shards(self) -> int:
        """How many shards a topic may name."""
        shards = int(self._host.identity().get("shards", call_arguments.SHARDS_MAX))
        return max(shards, int(self._host.store.state.progress.get(SHARDS, {}).get("known", 0)))

    def _op_add_queues(
        self,
        name: str,
        queues: int,
        shards: list[int],
        are_hidden: bool,
        former_queues: list[int] | None = None,
        hidden_queues: int | None = None,
    ) -> dict[str, Any]:
        """Give a topic more queues: first hidden ones on all shards, then shown ones.

        Args: `former_queues`, `hidden_queues`: of other shards, for one that has missed an addition.
        """
        self._host.check_serving()
        call_arguments.check_name("topic", name)
        call_arguments.check_integer("queues", queues, 1, QUEUES_MAX)

        copied = None
        if former_queues is not None and hidden_queues is not None:
            copied = (
                tuple(
                    call_arguments.check_integer("former_queues", each, 1, queues)
                    for each in former_queues
                ),
                call_arguments.check_integer("hidden_queues", hidden_queues, 0, queues - 1),
            )

        appended = self._host.store.add_queues(
            name,
            queues,
            call_arguments.check_shards(shards, self._known_shards()),
            are_hidden=bool(are_hidden),
            copied=copied,
        )
        end = self._host.store.topic_end(name)
        self._host.await_promise(appended or AppendedRows.up_to(end))
        # Read after the append, as in `create_topic`.
        return {"added": appended is not None, "shards": self._host.identity().get("shards", 1)}

    def _op_set_schema(self, name: str, schema: str) -> dict[str, Any]:
        """Give a topic a schema that has more columns than the present one."""
        self._host.check_serving()
        call_arguments.check_name("topic", name)
        appended = self._host.store.set_schema(name, call_arguments.check_name("schema", schema))
        end = self._host.store.topic_end(name)
        self._host.await_promise(appended or AppendedRows.up_to(end))
        # Read after the append, as in `create_topic`.
        return {"changed": appended is not None, "shards": self._host.identity().get("shards", 1)}

    def _op_queue_ranges(self, topic: str) -> dict[str, Any]:
        info = self._topic(topic)
        self._host.await_check()
        self._host.await_dispatch()
        shard = int(self._host.identity()["shard"])
        return {
            str(queue_id): list(self._host.store.queue_range(topic, queue_id))
            for queue_id in range(info.queues)
            if info.shard_of(queue_id) == shard
        }

    def _topic(self, name: Any) -> TopicInfo:
        """The facts of a topic. Raises: Rejected when it does not exist."""
        topics = self._host.store.state.topics
        return topics[call_arguments.check_known(name, topics)]

    def _check_queue(self, info: TopicInfo, queue_id: Any) -> None:
        """Raises: Rejected for a queue of another shard."""
        call_arguments.check_integer("queue_id", queue_id, 0, info.queues - 1)
        shard = int(self._host.identity()["shard"])
        if info.shard_of(queue_id) != shard:
            raise Rejected(
                f"queue {queue_id} of {info.name} is on shard {info.shard_of(queue_id)}, this is shard {shard}",
                field="queue_id",
                limit=f"the queues of shard {shard}",
            )

    def _op_commit_offsets(self, group: str, topic: str, offsets: dict[str, int]) -> dict[str, Any]:
        self._host.check_serving()
        call_arguments.check_name("group", group)
        info = self._topic(topic)
        wanted = call_arguments.check_offsets(offsets)
        for queue_id, offset in wanted.items():
            self._check_queue(info, queue_id)
            self._check_offset(info, queue_id, offset)
        self._host.await_promise(self._host.store.commit_offsets(group, topic, wanted))
        return {}

    def _check_offset(self, info: TopicInfo, queue_id: int, offset: int) -> None:
        """Raises: OffsetOutOfRange for an offset that a fetch would refuse as well; as `await_check`."""
        store = self._host.store
        low, high = store.queue_range(info.name, queue_id)
        if info.compacted:
            # A fetch may begin at offsets that were compacted away.
            low = 0
        # After a start, the dispatched end may still be below the confirmed end.
        high = max(high, store.state.next_offsets.get((info.name, queue_id), 0))

        if not low <= offset <= high:
            # The queue of a newer leader may end later.
            self._host.await_check()
            raise OffsetOutOfRange(
                f"offset {offset} of queue {queue_id} of {info.name} cannot be committed: the queue holds "
                f"{low} to {high}. Nothing was committed",
                min=low,
                max=high,
                offset=offset,
                queue_id=queue_id,
                field="offsets",
                limit=f"{low}..{high}",
            )

    def _op_send_back(
        self, group: str, topic: str, queue_id: int, offset: int, delay_level: int
    ) -> dict[str, Any]:
        self._host.check_serving()
        self._check_queue(self._topic(topic), queue_id)
        call_arguments.check_integer("offset", offset)
        call_arguments.check_integer("delay_level", delay_level, -(2**31), 2**31 - 1)
        call_arguments.check_name("group", group)
        store, shard = self._host.store, int(self._host.identity()["shard"])
        target, appended = send_back(
            store, group, topic, queue_id, offset, delay_level=delay_level, shard=shard
        )
        self._host.await_promise(appended)
        return {"topic": target}

    def _op_offsets(self, group: str, topic: str) -> dict[str, Any]:
        call_arguments.check_name("group", group)
        self._topic(topic)
        # Another replica may lead already, and have newer commits.
        self._host.await_check()
        # After a failover, commits that the leader before acknowledged may not be confirmed here yet.
        self._host.await_dispatch()
        table = self._host.store.confirmed_offsets(group, topic, self._host.visible_end)
        return {str(queue_id): offset for queue_id, offset in table.items()}

    def _op_decide_write(
        self, decision: dict[str, Any], complete: int | None = None
    ) -> dict[str, Any]:
        """Decide which staged rows a write consists of, unless that is decided.

        Args: `complete`: of a stream, the newest batch whose rows are known to be published.
        Returns: the decision that counts, and of a batch whether its rows are published. Or the `previous` decision,
        whose rows must be published first, and nothing is decided.
        """
        self._host.check_serving()
        store = self._host.store
        decision = call_arguments.check_decision(decision)
        if complete is not None:
            call_arguments.check_integer("complete", complete)
        batch = StreamBatch.of(decision)
        if batch is None or write_decisions.is_decided(store, decision["write_id"]):
            return {"decision": self._decide_alone(decision)}

        self._host.await_dispatch()
        if not stream_batches.has_room(decision) and not write_decisions.has_decided(store, batch):
            return {"decision": self._decide_alone(decision)}
        while True:
            found = write_decisions.decide_batch(store, batch, decision, complete)
            if found is not None:
                self._host.await_promise(AppendedRows.up_to(found.end_offset))
                if found.decision["batch"][1] != batch.number:
                    return {"previous": found.decision}
                return {"decision": found.decision, "is_published": found.is_published}
            self._host.await_dispatch()

    def _decide_alone(self, decision: dict[str, Any]) -> dict[str, Any]:
        """The decision on a write with producers of its own."""
        store = self._host.store
        own = {name: value for name, value in decision.items() if name != "batch"}
        appended = write_decisions.decide(store, own)
        self._host.await_promise(appended)
        self._host.await_dispatch()
        return write_decisions.first_decision(store, appended)

    def _op_publish_rows(
        self,
        write_id: str,
        topic: str,
        queue_id: int,
        ranges: list[list[int]],
        batch: list[Any] | None = None,
    ) -> dict[str, Any]:
        """Publish staged rows of a decided write in a queue of this shard, or in its timers, for about `PUBLISH_MS`.

        Args: `batch`: of the decision on a batch of a stream.
        Returns: how many rows of the write are published there, and whether those are all.
        """
        self._host.check_serving()
        if topic == TIMER_TOPIC:
            call_arguments.check_integer("queue_id", queue_id, 0, 0)
        else:
            self._check_queue(self._topic(topic), queue_id)
        wanted = call_arguments.check_ranges(ranges)
        producer_id = write_decisions.rows_producer_id(
            call_arguments.check_name("write_id", write_id)
        )
        first_sequence = 0
        found_batch = call_arguments.check_batch(batch)
        if found_batch is not None:
            producer_id, first_sequence = found_batch.rows_producer_id, found_batch.first_sequence
        self._host.await_dispatch()

        store = self._host.store
        until_ms = store.clock.monotonic_ms() + PUBLISH_MS
        found = staged_rows.publish(
            store,
            topic,
            queue_id,
            producer_id=producer_id,
            first_sequence=first_sequence,
            ranges=wanted,
            is_over=lambda: store.clock.monotonic_ms() >= until_ms,
        )

        # Rows that an earlier call has stored may not be confirmed yet.
        self._host.await_promise(found.appended or AppendedRows.up_to(store.log.end))
        return {"rows": found.rows, "is_complete": found.is_complete}

    def _op_known_producers(self, producer_ids: list[int]) -> dict[str, Any]:
        """Find those of these producer ids that this shard knows, in their order."""
        wanted = call_arguments.check_producer_ids(producer_ids)
        self._host.await_check()
        return {"producer_ids": self._host.store.known_producers(wanted)}

    def _op_fence_producer(self, producer_id: int, epoch: int, topic: str) -> dict[str, Any]:
        """Refuse puts of a producer with a lower epoch. Returns: the next sequence of each queue of this shard."""
        self._host.check_serving()
        call_arguments.check_integer("producer_id", producer_id, 0, PRODUCER_MAX)
        call_arguments.check_integer("epoch", epoch, 0, EPOCH_MAX)
        info = self._topic(topic)
        store, shard = self._host.store, int(self._host.identity()["shard"])
        appended = store.inner_put.fence_producer(producer_id, epoch)
        # An earlier call may have appended the record without learning whether it is confirmed. Until it is, another
        # replica may lead, and have rows that this one lacks.
        self._host.await_promise(appended or AppendedRows.up_to(store.log.end))

        own = [each for each in range(info.queues) if info.shard_of(each) == shard]
        entries = {each: store.state.producers.get((producer_id, topic, each)) for each in own}
        known = {str(each): entry.next_sequence for each, entry in entries.items() if entry}
        return {"sequences": known}

    def _op_init_producer(self, producer_id: int) -> dict[str, Any]:
        self._host.check_serving()
        call_arguments.check_integer("producer_id", producer_id, 0, PRODUCER_MAX)
        epoch, appended = self._host.store.inner_put.init_producer(producer_id)
        self._host.await_promise(appended)
        return {"epoch": epoch}
