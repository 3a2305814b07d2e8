"""`Cluster`: the handle on a running cluster, from which everything else is made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import TYPE_CHECKING, Any, Literal

import raymq
from raymq.client.arguments import plain_int, takes_options_of
from raymq.client.consume.consumer_config import ConsumerConfig, ConsumerOptions
from raymq.client.consume.wanted_topics import TopicChoice
from raymq.client.handle import STATUS_TIMEOUT_S, ClusterHandle, shards_of
from raymq.client.produce.producer_config import ProducerConfig, ProducerOptions
from raymq.client.topics.delete_topic import delete_topic
from raymq.client.topics.new_topic import create_topic
from raymq.client.transport.ask import may_lead_no_more, moved
from raymq.client.workers.workers_config import WorkersConfig, WorkersOptions
from raymq.replication.quorum import can_fail_over
from raymq.store.base.clock import Clock
from raymq.store.base.errors import DeliveryUnknown, RayMQError, Rejected, UntrustedServer
from raymq.store.base.files import Files

from .record.paths import ClusterPaths

if TYPE_CHECKING:
    from datetime import datetime

    import pyarrow as pa
    from typing_extensions import Unpack

    from raymq.client.dead_letters import DeadLetter
    from raymq.client.messages.received import ReceivedMessage
    from raymq.client.times import Time

    from .deploy.ray_host import Progress
    from .operations.drain_node import DrainReport
    from .operations.recover_shard import RecoveryPlan
    from .record.store_options import RunningOptions
    from .stop import StopReport

#: states of a shard that does not answer
_ABSENT = {"DOWN", "UNREACHABLE"}


@dataclass(kw_only=True, eq=False, repr=False)
class Cluster(ClusterHandle):
    """A running cluster. `raymq.start` and `raymq.connect` return it. Programs do not call the constructor.

    A Cluster makes producers and consumers, and administers topics. Threads may share it. It pickles into Ray tasks and
    other processes, together with the cluster's token: treat a pickled handle as a password. As a context manager it
    closes its connections, and stops the cluster only if the `start` that returned this handle started it. A forked
    child leaves both to its parent.

    Example:
        ```python
        import raymq

        with raymq.start("raymq-data") as cluster:
            cluster.create_topic("orders", queues=4)
            print(cluster.status()["state"], list(cluster.topics()))
        ```

    Raises:
        Rejected: a wrong argument. Nothing was done.
        Unavailable: a shard does not answer. Nothing was done, and the same call may succeed later.
        DeliveryUnknown: a shard did not answer within 30 s. The same call completes the operation.
    """

    stop_on_exit: InitVar[bool] = False

    def __post_init__(self, stop_on_exit: bool) -> None:
        super().__post_init__()
        self._stop_on_exit = stop_on_exit

    def __getstate__(self) -> dict[str, object]:
        state = super().__getstate__()
        # A copy in another process did not start the cluster.
        state["_stop_on_exit"] = False
        return state

    def describe(self) -> dict[str, Any]:
        """The cluster's name, id, shards, replicas, flush, version, endpoints, data directory and Ray address."""
        facts = self.call(None, "describe", {})
        self.learn_shards(int(facts.get("shards", 0)))
        return {
            "name": self.name,
            "cluster_id": self.cluster_id,
            "shards": self.shards,
            "replicas": facts.get("replicas"),
            "flush": facts.get("flush"),
            "version": facts.get("version"),
            "endpoints": {str(shard): self.endpoints[shard] for shard in sorted(self.endpoints)},
            "data_dir": self.data_dir,
            "ray_address": self.ray_address,
        }

    def status(self) -> dict[str, Any]:
        """The state, positions, counters and roles of each shard, or why it does not answer.

        All shards are asked at the same time. A shard that refuses the connection is "DOWN". A shard without an answer
        for 2 s, such as a stopped process, is "UNREACHABLE". The cluster's `state` is "RUNNING" when every shard is
        RUNNING, "DOWN" when no shard answers, else "DEGRADED". Never raises for a shard that does not answer.
        """
        found = self._ask_status(range(self.shards))
        elsewhere = {shard for shard, answer in found.items() if self._may_lead_elsewhere(answer)}
        if elsewhere:
            new = self._find(elsewhere)
            # A silent replica is not waited for again, unless another one leads.
            silent = {each for each in elsewhere if isinstance(found[each], DeliveryUnknown)}
            found |= self._ask_status(elsewhere - silent | elsewhere & new)

        added = self.learn_shards(max((shards_of(answer) for answer in found.values()), default=0))
        if added:
            found |= self._ask_status(added)

        shards = [
            {**_facts(shard, answer), "endpoint": self.endpoints.get(shard)}
            for shard, answer in sorted(found.items())
        ]
        if self.placement is not None:
            self._add_nodes(shards, self.placement)

        return {
            "name": self.name,
            "cluster_id": self.cluster_id,
            "state": _state_of({facts.get("state") for facts in shards}),
            "shards": shards,
            "data_dir": self.data_dir,
            "ray_address": self.ray_address,
        }

    def _may_lead_elsewhere(self, answer: dict[str, object] | RayMQError) -> bool:
        """Whether an answer to `status` may not be that of the shard's leader."""
        if not isinstance(answer, RayMQError):
            return answer.get("mode") == "follower"
        if not can_fail_over(self.replicas):
            return moved(answer)
        return may_lead_no_more(answer) or isinstance(answer, UntrustedServer)

    def _ask_status(self, shards: Iterable[int]) -> dict[int, dict[str, object] | RayMQError]:
        """The status of each shard, or its error."""
        return dict(self._routes().ask(shards, "status", {}, STATUS_TIMEOUT_S))

    def _add_nodes(
        self, shards: list[dict[str, Any]], placement: tuple[tuple[str, ...], ...]
    ) -> None:
        """Add `nodes` to each shard, and to a shard in trouble which of its nodes are `away`."""
        missing: list[str] = []
        if self.ray_address is not None and any(map(_in_trouble, shards)):
            from .deploy.node_labels import away

            missing = away(self.ray_address, (node for nodes in placement for node in nodes))
        for facts in shards:
            # A handle on another machine does not know the nodes of shards that were added.
            nodes = placement[facts["shard"]] if facts["shard"] < len(placement) else ()
            facts["nodes"] = list(nodes)
            facts["away"] = []
            if _in_trouble(facts):
                facts["away"] = [node for node in nodes if node in missing]
            if facts["away"]:
                facts["error"] = _cause_of_absence(facts["away"], facts.get("error"))

    def create_topic(
        self,
        name: str,
        *,
        queues: int = 4,
        compacted: bool = False,
        schema: pa.Schema | None = None,
        allow_null_values: bool = False,
    ) -> bool:
        """Create a topic whose queues are spread over all shards.

        Example:
            ```python
            import raymq

            with raymq.connect() as cluster:
                print(cluster.create_topic("orders", queues=4))
            ```

        Args:
            name: at most 127 characters of `a-zA-Z0-9_%|-`.
            queues: number of queues (default 4). Messages are ordered within a queue. Each queue has its own files
                on the disk of its shard.
            compacted: keep the latest message of each index key. Every message then needs index keys.
            schema: the columns of the messages' values; None (default): values are bytes. Each value is stored as one
                JSON object. Reads give the columns instead of bytes, and writes that do not fit are refused. Only
                columns may be not nullable, not what is nested in them.
            allow_null_values: whether a value may be null (default: no), which is not an empty value. In a compacted
                topic it deletes its key. With a schema, a row of nothing but nulls is a null value.

        Returns: False if the topic exists with the same queues and options. One that is older than some of the shards
        stays on those that it has, and one that has got more queues or columns since keeps these.
        Durable: on every shard, at return.

        Raises:
            Rejected: a bad name or count, a column that a schema cannot have, or the topic exists with another number
                of queues, schema, `compacted` or `allow_null_values`.
            Unavailable: a shard does not answer. The same call completes the creation.
            DeliveryUnknown: a shard did not make the topic durable within 15 s. The same call completes the creation.
        """
        return create_topic(
            self,
            name,
            queues=queues,
            compacted=compacted,
            schema=schema,
            allow_null_values=allow_null_values,
        )

    def delete_topic(self, name: str) -> bool:
        """Delete a topic with its messages and the offsets that groups have committed in it, on all shards.

        Consumers of it get an error, and members of groups give its queues up. A topic that is made with the same name
        is another one: it begins empty, at the offsets where this one ended, so that no old offset means a new message.
        The disk is freed when the files of the log expire. Messages that wait for a delivery time come to the topic of
        that name, if there is one by then. Neither this nor the loss of the messages can be undone.

        Example:
            ```python
            import raymq

            with raymq.connect() as cluster:
                cluster.create_topic("trial", queues=1)
                cluster.delete_topic("trial")
            ```

        Returns: True. Durable: on every shard, at return.

        Raises:
            Rejected: no such topic, or one of RayMQ's own.
            Unavailable: a shard does not answer. The same call completes the deletion.
            DeliveryUnknown: a shard did not delete the topic durably within 15 s. The same call completes the deletion.
        """
        return delete_topic(self, name)

    def add_queues(self, topic: str, queues: int, *, break_key_order: bool = False) -> bool:
        """Give a topic more queues, spread over all shards, while producers and consumers go on.

        Producers use the new queues within 30 s. Consumers that read the whole topic read them within 30 s, from their
        first message. The messages of the present queues stay where they are.

        Example:
            ```python
            import raymq

            with raymq.connect() as cluster:
                cluster.create_topic("events", queues=2)
                cluster.add_queues("events", 8)
                print(cluster.topics()["events"]["queues"])
            ```

        Args:
            topic: name of a topic that is not compacted, and that no `Queue` uses.
            queues: number of queues afterwards, at least the present one.
            break_key_order: a key belongs to the queue `hash % queues`, so that new messages of most keys go to another
                queue than the old ones, and may be read before them. False (default) refuses that for a topic that
                has had messages. Also needed if its messages have no keys: nothing remembers whether they have.

        Returns: False if the topic has so many queues already.
        Durable: on every shard, at return.

        Raises:
            Rejected: the topic does not exist, has more queues or messages, or cannot get queues.
            Unavailable: a shard does not answer. The same call completes the operation.
            DeliveryUnknown: a shard did not make the change durable within 15 s. The same call completes it.
        """
        from raymq.client.topics.add_queues import add_queues

        return add_queues(self, topic, plain_int(queues), break_key_order=break_key_order)

    def add_column(self, topic: str, column: pa.Field) -> bool:
        """Give a topic's schema one more nullable column, while producers and consumers go on.

        It is the one change that a schema allows. Messages that are stored already have null in it. Producers take it
        within 30 s. Consumers and reads that are made later give it.

        Example:
            ```python
            import pyarrow as pa
            import raymq

            with raymq.connect() as cluster:
                cluster.create_topic("bills", schema=pa.schema([("id", pa.int64())]))
                cluster.add_column("bills", pa.field("note", pa.string()))
                print([column["name"] for column in cluster.topics()["bills"]["schema"]])
            ```

        Args:
            topic: a topic with a schema.
            column: its name, and a type that a schema can have.

        Returns: False if the topic has that column already.
        Durable: on every shard, at return.

        Raises:
            Rejected: the topic has no schema, or has a column of that name and another type.
            Unavailable: a shard does not answer. The same call completes the operation.
            DeliveryUnknown: a shard did not make the change durable within 15 s. The same call completes it.
        """
        from raymq.client.topics.add_column import add_column

        return add_column(self, topic, column)

    def offsets_for_times(
        self,
        topic: str,
        times: Time | Mapping[int, Time],
        boundary: Literal["first", "last"] = "first",
    ) -> dict[int, int]:
        """The offset of each queue at a time: where a reader begins to see what was stored from then on.

        Example:
            ```python
            import datetime
            import raymq

            with raymq.connect() as cluster:
                cluster.create_topic("orders", queues=4)
                an_hour_ago = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(hours=1)
                offsets = cluster.offsets_for_times("orders", an_hour_ago)
                with cluster.consumer("orders", start=offsets) as consumer:
                    print(consumer.poll(timeout=1))
            ```

        Args:
            topic: an existing topic.
            times: milliseconds since 1970, or a datetime with a time zone, for all queues; or {queue_id: time}. Store
                times count, which the clocks of the shards give, and which never go back within a shard.
            boundary: "first" (default): the first message at that time or later, and if there is none the end of the
                queue, which the next message gets. "last": the last message at that time or earlier, and if there is
                none the first message that is left.

        Returns: queue_id -> offset.

        Raises:
            Rejected: the topic or a queue does not exist, or a time is none or before 2001.
            Corrupt: a message that the search meets cannot be read.
            Unavailable: a shard does not answer, or too few replicas say that it still leads.
        """
        from raymq.client.consume.offsets_by_time import offsets_for_times

        return offsets_for_times(self, topic, times, boundary)

    def query(
        self,
        topic: str,
        *,
        key: str | None = None,
        unique_key: str | None = None,
        between: tuple[Time | None, Time | None] | None = None,
        max_records: int = 64,
    ) -> list[ReceivedMessage]:
        """The newest messages of a topic with a key, or of a time, of all shards.

        Each shard looks in its index, which has every acknowledged message. A query by key reads only messages of that
        key, however many the topic has. Of a compacted topic only messages that are left are found.

        Example:
            ```python
            import raymq

            with raymq.connect() as cluster:
                cluster.create_topic("orders", queues=4)
                with cluster.producer() as producer:
                    producer.send("orders", b"one espresso", index_keys=("order-7",))
                for message in cluster.query("orders", key="order-7"):
                    print(message.store_time_ms, message.queue_id, message.offset, message.body)
            ```

        Args:
            topic: an existing topic.
            key: one of the index keys with which the message was sent, RocketMQ's KEYS. None (default): any.
            unique_key: the id that a client of RocketMQ gave the message, its UNIQ_KEY, or that `send` gave one with
                `deliver_at_ms`. Not together with `key`. None (default): any.
            between: the first and the last store time, both included: each milliseconds since 1970, a datetime with a
                time zone, or None for no limit. None (default): any time. Without a key these are all messages of that
                time.
            max_records: how many messages at most; 64 by default. By key the shards' option `max_msgs_num_batch` is the
                limit, otherwise 1,024.

        Returns: the messages in the order of their store times, the oldest first. If there are more than `max_records`
        these are the newest.

        Raises:
            Rejected: the topic does not exist, no key and no time is given, `max_records` is above the limit, or the
                shards index no keys (`message_index`).
            Corrupt: a message of the answer is damaged, and no replica could mend it. The error names file and offset.
            Unavailable: a shard does not answer, or is still building its index.
        """
        from raymq.client.consume.queries import query

        return query(
            self,
            topic,
            key=key,
            unique_key=unique_key,
            between=between,
            max_records=max_records,
        )

    def message(self, topic: str, queue_id: int, offset: int) -> ReceivedMessage:
        """The message at an offset of a queue, such as that of a receipt.

        Example:
            ```python
            import raymq

            with raymq.connect() as cluster:
                cluster.create_topic("orders", queues=4)
                with cluster.producer() as producer:
                    receipt = producer.send("orders", b"one espresso").result(timeout=30)
                print(cluster.message(receipt.topic, receipt.queue_id, receipt.offset).body)
            ```

        Args:
            topic: an existing topic.
            queue_id: a queue of it.
            offset: the offset in that queue.

        Raises:
            Rejected: the topic or the queue does not exist.
            OffsetOutOfRange: the queue holds no message at the offset: not yet, no more, or it was compacted.
            Corrupt: the message is damaged, and no replica could mend it.
            Unavailable: the shard does not answer.
        """
        from raymq.client.consume.queries import message

        return message(self, topic, queue_id, offset)

    def message_by_id(self, message_id: str) -> ReceivedMessage:
        """The message with an id, which is the `message_id` of a message that was read.

        The id names the address of the shard that stored the message, and the place in its log. Each shard of the
        cluster is asked, because the shard may listen elsewhere by now.

        Example:
            ```python
            import raymq

            with raymq.connect() as cluster:
                cluster.create_topic("orders", queues=4)
                with cluster.producer() as producer:
                    receipt = producer.send("orders", b"one espresso").result(timeout=30)
                message = cluster.message(receipt.topic, receipt.queue_id, receipt.offset)
                print(cluster.message_by_id(message.message_id).body)
            ```

        Args:
            message_id: RocketMQ's offset message id, 32 hexadecimal digits, or 56 with an IPv6 address.

        Raises:
            Rejected: the text is not an id, no message of the cluster has it (any more), or two shards have such a
                message, because one had the port of the other before.
            Corrupt: the message is damaged, and no replica could mend it.
            Unavailable: no shard that answers has the message, and another one does not answer.
        """
        from raymq.client.consume.queries import message_by_id

        return message_by_id(self, message_id)

    def groups(self) -> dict[str, dict[str, Any]]:
        """Every consumer group: how it is used, and how many members it has.

        Example:
            ```python
            import raymq

            with raymq.connect() as cluster:
                for name, facts in cluster.groups().items():
                    print(name, facts["kind"], facts["state"], facts["members"])
            ```

        Returns: name -> `kind` ("stream": its members share the queues; "workers": they share the messages; "manual":
        it has had no member, only committed offsets), `state` ("paused", "active" with members or clients, else
        "empty"; of workers also "paused: dead letters", see their option `dlq_rate`), `members`, their number, and
        `clients`, how many clients of RocketMQ consume in it.
        Raises: Unavailable: a shard does not answer.
        """
        from raymq.client.group_facts import list_groups

        return list_groups(self)

    def describe_group(self, name: str) -> dict[str, Any]:
        """The members of a consumer group, the owner of each queue, and how far the group is.

        Example:
            ```python
            import raymq

            with raymq.connect() as cluster:
                cluster.create_topic("orders", queues=4)
                with cluster.consumer("orders", group="billing", start="earliest"):
                    for queue in cluster.describe_group("billing")["queues"]:
                        print(queue["queue_id"], queue["member"], queue["lag"])
            ```

        Returns: `group`; `coordinator`, the shard that coordinates it; `kind`; `paused`; `pauses`, of workers: each
        `shard` on which they get nothing, and the `reason` ("dead letters", "operator"); `filters`; `lag`, the messages
        after the committed offsets; `lag_s`, the age of the oldest of them in seconds; `members`, each with `member`
        (its id), `client` (host:pid), `instance_id`, `topics`, `pattern`, `session_timeout_ms`, `version` and `applied`
        (of its assignment), `silent_ms` since its newest heartbeat and `state` ("stable", "releasing", "replaced",
        "away"); `clients`, of RocketMQ, which share the group's queues, as their servers have said in the last 30 s,
        each with `protocol`, `client` (its id), `address`, `language`, `version` and `since_ms`, since 1970; `queues`,
        each with `topic`, `queue_id`, `shard`, `member` (its owner or None), `number`, `revoking`, `locked_by` (the id
        of the client of RocketMQ that has locked it, or None) and `lock_age_s` since the lock was renewed, `leased`,
        `waiting` and `next` (of workers: messages that they have, messages that wait for their next delivery, and the
        first offset that was never leased; else None), `committed` (None: no offset), `max_offset`, `lag` and `lag_s`.

        Raises:
            Rejected: the group does not exist.
            Unavailable: a shard does not answer.
        """
        from raymq.client.group_facts import describe_group

        return describe_group(self, name)

    def reset_group(
        self,
        name: str,
        to: str | int | datetime,
        *,
        topic: str | None = None,
        queue_ids: Iterable[int] | None = None,
        dry_run: bool = False,
        force: bool = False,
    ) -> list[dict[str, Any]]:
        """Set where a consumer group goes on.

        With `force` members lose the queues first: their later commits raise `Fenced`. Each member hears of it with its
        next heartbeat, runs `on_revoked`, claims the queues again and begins at the new offsets. Clients of RocketMQ
        hear of it from their server, within 10 s. Without a topic, the group's retry topic stays as it is.

        Example:
            ```python
            import raymq

            with raymq.connect() as cluster:
                cluster.create_topic("orders", queues=4)
                with cluster.consumer("orders", group="billing", start="earliest") as consumer:
                    consumer.poll(timeout=1)
                    consumer.commit()
                for row in cluster.reset_group("billing", "earliest"):
                    print(row["topic"], row["queue_id"], row["from"], row["to"])
            ```

        Args:
            name: name of the group.
            to: "earliest", "latest", an offset for each of the queues, or a datetime with a time zone, as `start=` of a
                consumer takes them; or "group:NAME": where that group is, in the queues of which it has offsets.
            topic: only this topic, also one that the group has not read yet. None (default): all that it reads.
            queue_ids: only these queues of the topic. None (default): all.
            dry_run: return the rows and change nothing (default: no).
            force: also while members have queues, or clients of RocketMQ consume in the group (default: no).

        Returns: a row for each queue: `topic`, `queue_id`, `from` (the committed offset, None: there is none) and `to`.
        Durable: at return.

        Raises:
            Rejected: the group, the topic or a queue does not exist; or without `force`, members have the queues, or
                clients of RocketMQ consume in the group: the error names them. Nothing was changed.
            OffsetOutOfRange: a queue does not hold the offset. Nothing was changed.
            Unavailable: a shard does not answer, or members claim the queues again too quickly. Other queues may be
                reset. The same call completes it.
            DeliveryUnknown: a shard did not make it durable within 15 s. The same call completes it.
        """
        from raymq.client.group_admin import reset_group

        return reset_group(
            self, name, to, topic=topic, queue_ids=queue_ids, dry_run=dry_run, force=force
        )

    def delete_group(self, name: str) -> list[str]:
        """Delete a consumer group with its offsets. A group of the same name begins anew, at its `start`.

        Example:
            ```python
            import raymq

            with raymq.connect() as cluster:
                cluster.create_topic("orders", queues=4)
                with cluster.consumer("orders", group="trial", start="earliest"):
                    pass
                print(cluster.delete_group("trial"))
            ```

        Returns: the topics of which it had offsets.
        Durable: on every shard, at return.

        Raises:
            Rejected: the group does not exist, or has members. A member that joins meanwhile keeps its offsets on the
                shards that were not asked yet.
            Unavailable: a shard does not answer. The same call completes the deletion.
            DeliveryUnknown: a shard did not make it durable within 15 s. The same call completes it.
        """
        from raymq.client.group_admin import delete_group

        return delete_group(self, name)

    def pause_group(self, name: str) -> None:
        """Let the members or workers of a group get no messages until `resume_group`.

        They stay members, keep their queues, and may commit. A member hears of it with its next heartbeat, at most 3 s
        later. A consumer that joins a paused group gets no queues yet. Workers keep what they have leased, and may
        settle it. The pause holds over restarts and new leaders.

        Durable: at return.

        Raises:
            Rejected: the group has had no member and no worker.
            Unavailable: a shard does not answer. The same call completes it.
        """
        from raymq.client.group_admin import pause_group

        pause_group(self, name, paused=True)

    def resume_group(self, name: str) -> None:
        """Let a paused group get messages again: members from their next heartbeat on, workers at once.

        Workers that were paused by too many dead letters count these from 0 again.

        Durable: at return.

        Raises:
            Rejected: the group has had no member and no worker.
            Unavailable: a shard does not answer. The same call completes it.
        """
        from raymq.client.group_admin import pause_group

        pause_group(self, name, paused=False)

    def release_leases(self, name: str, *, topic: str | None = None) -> int:
        """Take what the workers of a group hold back, because they hang for example. Other workers get it at once.

        The attempts count. A worker that settles such a message later gets Fenced. One that still runs gets further
        messages: stop it first.

        Args:
            name: the group.
            topic: only messages of this topic (default: of all).

        Returns: how many messages they were.
        Durable: on every shard, at return.

        Raises:
            Unavailable: a shard does not answer. The same call completes it.
            DeliveryUnknown: a shard did not make it durable within 15 s. The same call completes it.
        """
        from raymq.client.group_admin import release_leases

        return release_leases(self, name, topic=topic)

    def dead_letter_groups(self, name: str | None = None) -> dict[str, dict[str, Any]]:
        """The groups that have dead letters: messages that they could not handle, and that were not put back.

        Example:
            ```python
            import raymq

            with raymq.connect() as cluster:
                for name, facts in cluster.dead_letter_groups().items():
                    print(name, facts["count"])
            ```

        Args:
            name: only this group (default: all).

        Returns: name -> `count`, and `oldest_ms` and `newest_ms`, when the oldest and the newest one died (None: not
            known). A group without dead letters is left out.

        Raises:
            Unavailable: a shard does not answer.
        """
        from raymq.client.dead_letters import dead_letter_groups

        return dead_letter_groups(self, name)

    def dead_letters(
        self, name: str, *, max_records: int = 100, where: str | None = None
    ) -> list[DeadLetter]:
        """What a group could not handle, the oldest first: of workers, of `send_back` and of RocketMQ's clients.

        Example:
            ```python
            import raymq

            with raymq.connect() as cluster:
                cluster.create_topic("emails", queues=4)
                with cluster.workers("emails", group="mailers"):
                    pass
                for letter in cluster.dead_letters("mailers"):
                    print(letter.reason, letter.attempts, letter.message.body)
            ```

        Args:
            name: the group.
            max_records: so many of each shard are looked at, and so many are returned (default 100).
            where: only those for whose properties this SQL92 expression is true, as `sql` of a consumer; None
                (default): all.

        Returns: of each its `message`, in the topic %DLQ%NAME, and `group`, `original_topic`, `original_queue_id`,
            `attempts`, `reason`, `holder` and `redrives`.

        Raises:
            Rejected: the group has no topic of dead letters; a wrong expression.
            Corrupt: one of them is damaged.
            Unavailable: a shard does not answer.
        """
        from raymq.client.dead_letters import dead_letters

        return dead_letters(self, name, max_records=max_records, where=where)

    def redrive(
        self,
        name: str,
        *,
        max_records: int | None = None,
        rate: float | None = None,
        to: str | None = None,
        where: str | None = None,
        dry_run: bool = False,
        progress: Callable[[str], object] | None = None,
    ) -> dict[str, Any]:
        """Put dead letters of a group back into the topics and queues from which they came.

        Each is appended there together with the record that settles it, on its shard. So it is neither lost nor put
        back twice, whatever process dies, and two calls at the same time share the work. Its attempts begin at 0 again,
        and it counts how often it was put back in the property REDRIVES. All groups that read the topic get it again. A
        dead letter whose topic or queue does not exist any more stays one.

        Example:
            ```python
            import raymq

            with raymq.connect() as cluster:
                cluster.create_topic("emails", queues=4)
                with cluster.workers("emails", group="mailers"):
                    pass
                print(cluster.redrive("mailers", rate=100)["redriven"])
            ```

        Args:
            name: the group.
            max_records: so many at most; None (default): all that are there when the call begins.
            rate: so many a second at most; None (default): no limit. 64 make one append.
            to: another topic, with a queue on each shard that has dead letters (default: where they came from).
            where: only those for whose properties this SQL92 expression is true; None (default): all.
            dry_run: say what would go where, and change nothing (default: no).
            progress: called with a line of text every second (default: nothing).

        Returns: `group`, `dry_run`, `redriven` (how many), `topics` (how many went to each), `refused`: those that
            stay, each with `shard`, `queue_id` and `offset` of %DLQ%NAME, and `why`; and `by_others`: how many another
            call has put back meanwhile, or have expired.
        Durable: on every shard, at return.

        Raises:
            Rejected: the group has no topic of dead letters; a topic that cannot get them; a wrong expression. Nothing
                was put back.
            Unavailable: a shard does not answer within a minute. What was put back is settled, and another call goes
                on.
        """
        from raymq.client.dead_letters import redrive

        return redrive(
            self,
            name,
            max_records=max_records,
            rate=rate,
            to=to,
            where=where,
            dry_run=dry_run,
            progress=progress,
        )

    def config(self) -> dict[str, dict[str, Any]]:
        """Every option of the stores: its value, its default, and when it may change.

        Example:
            ```python
            import raymq

            with raymq.connect() as cluster:
                print(cluster.config()["flush_interval_ms"]["value"])
            ```

        Returns: option -> `value`, `default` and `changes` ("first start", "each start" or "while running"). If it was
        set while the cluster ran, also `before`, `at_ms` (wall clock) and `by` of the last change. If shards differ,
        because a change has not reached all of them, also `by_shard`.
        """
        from .operations.set_config import config

        return config(self)

    def set_config(self, config: RunningOptions) -> dict[str, dict[str, Any]]:
        """Change options of the stores while producers and consumers go on.

        The leaders use the new values at once, followers when they have the record. The change holds over restarts and
        new leaders, until it is set again or a start names the option.

        Example:
            ```python
            import raymq

            with raymq.connect() as cluster:
                cluster.set_config({"flush_interval_ms": 200, "file_reserved_hours": 48})
            ```

        Args:
            config: options that may change while the cluster runs, with their new values.

        Returns: the options that were named, as `config` gives them: `value`, and of the last change `before`, `at_ms`
        and `by`. An option that has the value already is not changed.
        Durable: in the log of every shard, at return.

        Raises:
            Rejected: an option that does not exist or does not change while the cluster runs, or a value that it does
                not take. Nothing was changed. If the error names a shard, that one refused, and the others have it.
            Unavailable: a shard does not take the change now; the others have it. The same call completes it.
            DeliveryUnknown: a shard did not make the change durable within 15 s. The same call completes it.
        """
        from .operations.set_config import set_config

        return set_config(self, config)

    @takes_options_of(ProducerConfig)
    def producer(self, **options: Unpack[ProducerOptions]) -> raymq.Producer:
        """A Producer of this cluster. `raymq.Producer` describes the options."""
        return raymq.Producer(self, **options)

    @takes_options_of(ConsumerConfig)
    def consumer(self, topic: TopicChoice, **options: Unpack[ConsumerOptions]) -> raymq.Consumer:
        """A Consumer of a topic, of several, or of all that `raymq.matching(pattern)` names.

        `raymq.Consumer` describes the options.
        """
        return raymq.Consumer(self, topic, **options)

    @takes_options_of(ProducerConfig)
    def async_producer(self, **options: Unpack[ProducerOptions]) -> raymq.AsyncProducer:
        """An AsyncProducer of this cluster. `raymq.AsyncProducer` describes the options."""
        return raymq.AsyncProducer(self, **options)

    @takes_options_of(ConsumerConfig)
    def async_consumer(
        self, topic: TopicChoice, **options: Unpack[ConsumerOptions]
    ) -> raymq.AsyncConsumer:
        """An AsyncConsumer of a topic or of several, with the arguments of `raymq.Consumer`."""
        return raymq.AsyncConsumer(self, topic, **options)

    @takes_options_of(WorkersConfig)
    def workers(
        self, topics: str | Sequence[str], **options: Unpack[WorkersOptions]
    ) -> raymq.Workers:
        """Workers of a group that share the messages of a topic, or of several, and settle each alone.

        `raymq.Workers` describes the options.
        """
        return raymq.Workers(self, topics, **options)

    @takes_options_of(WorkersConfig)
    def async_workers(
        self, topics: str | Sequence[str], **options: Unpack[WorkersOptions]
    ) -> raymq.AsyncWorkers:
        """AsyncWorkers of a topic or of several, with the arguments of `raymq.Workers`."""
        return raymq.AsyncWorkers(self, topics, **options)

    def move_leader(self, shard: int, replica: int) -> None:
        """Let another replica lead a shard, and wait until it does. Sends wait for less than a second.

        Raises: Rejected when it cannot lead; Unavailable when it does not lead within 15 s.
        """
        from raymq.client.replica_status import move_leader

        clock = Clock()
        move_leader(self, shard, replica, pause=lambda seconds: clock.sleep_ms(seconds * 1000))

    def replace_replica(
        self,
        shard: int,
        replica: int,
        *,
        node: str | None = None,
        timeout_s: float = 600.0,
        progress: Progress | None = None,
    ) -> None:
        """Give the place of a lost replica to a new, empty one, and wait until that one has everything.

        What is left of the old directory is moved aside where the new one is made, and never deleted.

        Args:
            shard: number of the shard, from 0.
            replica: number of the replica, from 0. It must not lead the shard now.
            node: the label of the node for the new replica, which must have no other replica of this shard. None
                (default): the node of the old one.
            timeout_s: seconds until the new replica must be complete; 600 by default.
            progress: called with one line of text at a time; None (default) logs the lines.

        Durable: the new placement, after the processes of the old replica have ended.

        Raises:
            Rejected: it leads, is the only one that may lead, or may have the last copy of confirmed messages; or the
                node cannot have it. Nothing was changed.
            Unavailable: the cluster does not run, no replica leads the shard, or the new replica is not complete in
                time. It goes on by itself.
        """
        from .operations.replace_replica import replace_replica

        replace_replica(self, shard, replica, node=node, timeout_s=timeout_s, progress=progress)

    def set_replicas(
        self,
        replicas: Literal[2, 3, 5],
        *,
        nodes: Sequence[str] | None = None,
        timeout_s: float = 600.0,
        progress: Progress | None = None,
    ) -> None:
        """Give each shard of a cluster of one replica further ones, while producers and consumers go on.

        The new replicas get the log first, and count when they have it. Each shard restarts its process twice: sends
        wait for some seconds then. A call that ended early is completed by the same call, and one for a cluster that
        has so many replicas changes nothing.

        Args:
            replicas: copies of each shard from now on: 2, 3 or 5. From then on a send waits for a majority of disks.
            nodes: labels of the nodes that have replicas then, the present ones among them. None (default): the nodes
                of the first start. Only for a cluster that was started with `nodes`; any other one stays on its
                machine, and so outlives the loss of processes and damage of files, not the loss of the machine.
            timeout_s: seconds until all new replicas must count; 600 by default.
            progress: called with one line of text at a time; None (default) logs the lines.

        Durable: the number and placement of replicas, before any process of them is made.

        Raises:
            Rejected: the cluster has another number of several replicas, or the number or a node cannot be. Nothing
                was changed.
            StorageFull: a disk has no room for the first files of the new replicas. Nothing was changed.
            Unavailable: the cluster does not run, or the new replicas have not copied everything in time. They go on.
        """
        from .operations.set_replicas import set_replicas

        set_replicas(self, replicas, nodes=nodes, timeout_s=timeout_s, progress=progress)

    def plan_recovery(self, shard: int, *, nodes: Mapping[int, str] | None = None) -> RecoveryPlan:
        """What `recover_shard` would give up. Nothing is changed.

        Args:
            shard: number of the shard, from 0.
            nodes: as of `recover_shard`, to check them.

        Raises:
            Rejected: the shard has enough replicas, or nothing could be recovered, or a node cannot have a replica.
            Unavailable: the cluster does not run.
        """
        from .operations.recover_shard import find_plan

        return find_plan(self, shard, nodes=nodes)

    def recover_shard(
        self,
        plan: RecoveryPlan,
        *,
        accept_loss: bool,
        nodes: Mapping[int, str] | None = None,
        timeout_s: float = 600.0,
        progress: Progress | None = None,
    ) -> None:
        """Go on without a majority of a shard's replicas: messages whose receipts were given may be lost.

        The lost replicas get empty successors, and one of the survivors leads. The old directories are moved aside
        where successors are made. The decision is written to the shard's log, to `cluster.json` and to
        `raymq shard describe`.

        Args:
            plan: of `plan_recovery`. No other replica is given up.
            accept_loss: must be True: confirmed messages that only the lost replicas have are gone, and their offsets
                are given to other messages.
            nodes: lost replica -> label of the node of its successor; one that is not named stays on its node.
            timeout_s: seconds until all successors must be complete; 600 by default.
            progress: called with one line of text at a time; None (default) logs the lines.

        Durable: what is given up and the new placement, after the processes of the lost replicas have ended.

        Raises:
            Rejected: `accept_loss` is not True, the shard has enough replicas, nothing could be recovered, or more
                would be given up than the plan says. Nothing was changed.
            Unavailable: the cluster does not run, or the successors are not complete in time. They go on by themselves.
        """
        from .operations.recover_shard import recover_shard

        if accept_loss is not True:
            raise Rejected(
                "an unclean recovery may lose confirmed messages: read the plan, and pass accept_loss=True",
                field="accept_loss",
                limit=True,
                found=accept_loss,
            )
        recover_shard(self, plan, nodes=nodes, timeout_s=timeout_s, progress=progress)

    def rolling_restart(
        self, *, replica_timeout_s: float = 120.0, progress: Progress | None = None
    ) -> None:
        """Restart every process, one replica after the other, while producers and consumers go on.

        Each replica is complete again before the next one ends. Leaders hand over first: sends wait for less than a
        second then. Over several nodes the former leaders lead again at the end. On one machine other replicas do.

        Args:
            replica_timeout_s: seconds that one replica may take to end, to start and to catch up; 120 by default.
            progress: called with one line of text at a time; None (default) logs the lines.

        Raises:
            Rejected: with one or two replicas a shard would be away. Nothing was changed.
            Unavailable: a replica is away or not complete, before it ends or in time after it; or the cluster does not
                run. The replicas after that one go on as they were. Repeat the call when the shards have all replicas.
        """
        from .operations.rolling_restart import rolling_restart

        rolling_restart(self, replica_timeout_s=replica_timeout_s, progress=progress)

    def add_shards(
        self,
        count: int = 1,
        *,
        nodes: Sequence[str] | None = None,
        timeout_s: float = 600.0,
        progress: Progress | None = None,
    ) -> list[int]:
        """Add shards while the others go on, and wait until they take new topics.

        Topics that exist stay where they are. Every topic that is created from now on is on the new shards, too.
        Other handles learn of them when they look up such a topic, and by `refresh` and `status`. After an interruption
        the same call, or `raymq.start`, completes the addition.

        Example:
            ```python
            import raymq

            with raymq.connect("raymq-data") as cluster:
                print(cluster.add_shards(), cluster.shards)
            ```

        Args:
            count: how many (default 1). The cluster may have 256 altogether.
            nodes: labels of the nodes over which all shards would be spread, in order: a new shard is where it would
                be then. None (default): those of the first start that are there, and those that have replicas now.
            timeout_s: seconds until the new shards must serve; 600 by default.
            progress: called with one line of text at a time; None (default) logs the lines.

        Returns: the numbers of the new shards.
        Durable: the new number and placement, before any process of a new shard is made.

        Raises:
            Rejected: too many shards, nodes that cannot have them, or an interrupted addition of another number.
                Nothing was changed.
            StorageFull: shared memory has no room for the transient pools, or a disk for the first files. Nothing was
                changed.
            Unavailable: the cluster or one of its shards does not run, or a new one does not serve in time. The same
                call completes the addition.
        """
        from .operations.add_shards import add_shards

        return add_shards(self, count, nodes=nodes, timeout_s=timeout_s, progress=progress)

    def enable_door(
        self,
        protocol: Literal["rocketmq"],
        *,
        port: int | None = None,
        access: Literal["key", "open"] | None = None,
        timeout_s: float = 60.0,
        progress: Progress | None = None,
    ) -> None:
        """Serve the clients of another system, as `start(rocketmq=...)` does. Nothing else changes meanwhile.

        A cluster that serves them already gets the options that are given; its clients connect again then.

        Example:
            ```python
            import raymq

            with raymq.connect("raymq-data") as cluster:
                cluster.enable_door("rocketmq", port=29876)
                print(cluster.doors()["rocketmq"][0]["node_port"])
            ```

        Args:
            protocol: "rocketmq".
            port: of each node, for name server requests. None (default): that of before, at first 9876.
            access: "key": clients sign each request. "open": they need not, only on 127.0.0.1. None (default): as
                before, at first "key".
            timeout_s: seconds until a server must work beside each replica; 60 by default.
            progress: called with one line of text at a time; None (default) logs the lines.

        Durable: at return, for later starts, too.

        Raises:
            Rejected: an option is wrong, the port is taken, or orjson is missing. Nothing was changed.
            Unavailable: the cluster does not run, or not every server works in time. They go on trying.
        """
        from .operations.doors import enable_door

        enable_door(
            self, protocol, port=port, access=access, timeout_s=timeout_s, progress=progress
        )

    def disable_door(
        self, protocol: Literal["rocketmq"], *, progress: Progress | None = None
    ) -> None:
        """Serve the clients of another system no more. What they stored stays.

        Raises: Rejected for an unknown protocol; Unavailable when the cluster does not run.
        """
        from .operations.doors import disable_door

        disable_door(self, protocol, progress=progress)

    def doors(self) -> dict[str, list[dict[str, Any]]]:
        """The servers for clients of other systems that have said where they listen within 30 s.

        Returns: {protocol: [{"shard", "replica", "address", "node_port", "pid", "leads"}...]}, by shard and replica.
        `node_port` is the port of its node for name server requests, or None when another server of the node has it.
        Raises: Unavailable when a shard does not answer.
        """
        self.learn_shards(int(self.call(None, "describe", {}).get("shards", 0)))
        found: dict[str, list[dict[str, Any]]] = {}
        for shard in range(self.shards):
            answer = self.call(shard, "doors", {})
            for protocol, replicas in answer["doors"].items():
                for replica, facts in replicas.items():
                    host, port = facts["address"]
                    row = {"shard": shard, "replica": int(replica), "address": f"{host}:{port}"}
                    leads = int(replica) == answer["leader"]
                    row |= {"node_port": facts["node_port"], "pid": facts["pid"], "leads": leads}
                    found.setdefault(protocol, []).append(row)
        return found

    def drain_node(
        self, node: str, *, timeout_s: float = 120.0, progress: Progress | None = None
    ) -> DrainReport:
        """Let other nodes lead every shard that a node leads, and wait until it leads nothing.

        The node leads again only after another loss of a leader, a start of the cluster, or `move_leader`. On the
        machine of the data directory the drain is noted until the next start, so that the controller gives the node no
        leadership back.

        Args:
            node: the label of the node.
            timeout_s: seconds until it must lead nothing; 120 by default.
            progress: called with one line of text at a time; None (default) logs the lines.

        Durable: the note, before the first leadership moves. While another command works on the data directory there is
        none, and a line of `progress` says so.

        Raises:
            Rejected: the node has no replica, or leads a shard that no other replica can lead. Nothing was done.
            Unavailable: it still leads a shard at the end of the time.
        """
        from .operations.drain_node import drain_node

        return drain_node(self, node, timeout_s=timeout_s, progress=progress)

    def stop(self, *, timeout_s: float = 60.0) -> StopReport:
        """Stop the cluster and close this handle. Data stays. `timeout_s` bounds the orderly end of all actors.

        Raises: Rejected on a machine without the data directory; Unavailable if a process cannot be ended.
        """
        from .stop import stop

        self.close()
        if self.data_dir is None:
            raise Rejected(
                f"cluster {self.name!r} is not on this machine: run `raymq stop` on the machine that has its data "
                "directory",
                field="data_dir",
            )
        self._stop_on_exit = False
        return stop(self.data_dir, timeout_s=timeout_s)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._stop_on_exit and not self._is_inherited:
            self.stop()
        else:
            self.close()

    def learn_shards(self, count: int) -> range:
        """Take note that the cluster has so many shards. Returns: those that this handle did not know."""
        added = super().learn_shards(count)
        if added:
            self._learn_placement()
        return added

    def _learn_placement(self) -> None:
        """Read the nodes of shards that were added, where the data directory is."""
        from .record.cluster_record import load_record

        if self.data_dir is not None and self.placement is not None:
            record = load_record(ClusterPaths(self.data_dir), Files())
            if record is not None and record.cluster_id == self.cluster_id:
                self.placement = record.placement


def _state_of(shard_states: set[object]) -> str:
    """The state of a cluster."""
    if shard_states == {"RUNNING"}:
        return "RUNNING"
    return "DOWN" if shard_states <= _ABSENT else "DEGRADED"


def _in_trouble(facts: dict[str, object]) -> bool:
    """Whether a lost node may be the cause of a shard's state."""
    return facts["state"] in _ABSENT or _follower_lags(facts)


def _cause_of_absence(away: list[str], error: str | None) -> str:
    """What is wrong with a shard of lost nodes, and with it the shard's own error."""
    from .deploy.node_labels import describe_away

    cause = "; ".join(map(describe_away, away))
    return f"{cause} ({error})" if error else cause


def _follower_lags(facts: dict[str, Any]) -> bool:
    """Whether a shard has stored bytes that its followers have not confirmed."""
    has_followers = "replication" in facts.get("supervisor", {}).get("roles", {})
    return has_followers and bool(facts.get("appended", 0) > facts.get("confirmed", 0))


def _facts(shard: int, answer: dict[str, object] | RayMQError) -> dict[str, object]:
    """The `status` entry for a shard with this answer."""
    if not isinstance(answer, RayMQError):
        return answer
    state = "UNREACHABLE" if isinstance(answer, DeliveryUnknown) else "DOWN"
    return {"shard": shard, "state": state, "error": str(answer)}
