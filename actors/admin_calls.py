"""The administrative operations of a leader: what `call` takes. Each `_op_NAME` is the operation NAME."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raymq.store.errors import Rejected
from raymq.store.services.retry import send_back

if TYPE_CHECKING:
    from .commit_log_host import LeaderHost


class AdminCalls:
    """Topics, offsets, producers and facts of one leader. Callers: any thread."""

    def __init__(self, host: LeaderHost) -> None:
        self._host = host

    def call(self, op: str, args: dict[str, Any]) -> dict[str, Any]:
        """An administrative operation.

        Raises: Rejected for an unknown operation or bad arguments.
        """
        handler = getattr(self, f"_op_{op}", None)
        if handler is None:
            raise Rejected(f"unknown operation {op!r}", field="op", limit="a known operation")
        result: dict[str, Any] = handler(**args)
        return result

    def _op_describe(self) -> dict[str, Any]:
        return self._host.identity()

    def _op_routes(self) -> dict[str, Any]:
        return dict(self._host.routes)

    def _op_status(self) -> dict[str, Any]:
        return self._host.status()

    def _op_topics(self) -> dict[str, Any]:
        return {
            t.name: {
                "queues": t.queues,
                "shards": list(t.shards),
                **({"compacted": True} if t.compacted else {}),
            }
            for t in list(self._host.store.state.topics.values())
        }

    def _op_delete_expired_files(self) -> dict[str, Any]:
        """Source: TRIGGER_DELETE_FILES (27)."""
        self._host.housekeeper.delete_now()
        return {}

    def _op_create_topic(
        self,
        name: str,
        queues: int,
        shards: list[int],
        attributes: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        self._host.check_serving()
        appended = self._host.store.create_topic(name, queues, shards, attributes)
        if appended is None:
            return {"created": False}
        self._host.await_promise(appended)
        return {"created": True}

    def _op_queue_ranges(self, topic: str) -> dict[str, Any]:
        info = self._host.store.state.topics.get(topic)
        if info is None:
            raise Rejected(
                f"topic {topic} does not exist", field="topic", limit="an existing topic"
            )
        self._host.await_dispatch()
        shard = int(self._host.identity()["shard"])
        return {
            str(queue): list(self._host.store.queue_range(topic, queue))
            for queue in range(info.queues)
            if info.shard_of(queue) == shard
        }

    def _op_check_record(self, topic: str, queue_id: int, offset: int) -> dict[str, Any]:
        """Whether the message at an offset is whole here. Raises: Corrupt naming file and place."""
        self._host.store.check_record(topic, queue_id, offset)
        return {}

    def _op_commit_offsets(self, group: str, topic: str, offsets: dict[str, int]) -> dict[str, Any]:
        self._host.check_serving()
        self._host.await_promise(
            self._host.store.commit_offsets(
                group, topic, {int(q): int(o) for q, o in offsets.items()}
            )
        )
        return {}

    def _op_send_back(
        self, group: str, topic: str, queue_id: int, offset: int, delay_level: int
    ) -> dict[str, Any]:
        self._host.check_serving()
        shard = int(self._host.identity()["shard"])
        target, appended = send_back(
            self._host.store,
            group,
            topic,
            queue_id,
            offset,
            delay_level=delay_level,
            shard=shard,
        )
        self._host.await_promise(appended)
        return {"topic": target}

    def _op_offsets(self, group: str, topic: str) -> dict[str, Any]:
        table = self._host.store.state.offsets.get((group, topic), {})
        return {str(queue): offset for queue, offset in table.items()}

    def _op_init_producer(self, producer_id: int) -> dict[str, Any]:
        self._host.check_serving()
        epoch, appended = self._host.store.init_producer(producer_id)
        self._host.await_promise(appended)
        return {"epoch": epoch}
