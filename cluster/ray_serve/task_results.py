"""The results of tasks, in a compacted topic: the latest one of each task stays."""

from __future__ import annotations

from typing import Any, NamedTuple

from raymq.client.messages.codecs import CONTENT_TYPE, Codec, codec
from raymq.client.messages.received import ReceivedMessage
from raymq.client.produce.producer import Producer
from raymq.cluster.cluster import Cluster

#: the name of the topic after that of the task queue
RESULTS_SUFFIX = "-results"
#: how long a result may take to be stored
STORE_TIMEOUT_S = 120.0

#: the states of a task, as Celery names them
PENDING, SUCCESS, FAILURE, REVOKED = "PENDING", "SUCCESS", "FAILURE", "REVOKED"


class StoredResult(NamedTuple):
    """What became of a task."""

    status: str
    #: what the handler returned, or the text of its exception
    result: Any = None
    attempts: int = 0
    #: seconds since 1970
    created_at: float | None = None


class TaskResults:
    """Stores and finds results. Threads: any."""

    def __init__(self, cluster: Cluster, queue: str, queues: int, codec: Codec) -> None:
        """Create the topic if it is missing."""
        self.topic = queue + RESULTS_SUFFIX
        self._cluster = cluster
        self._codec = codec
        if self.topic not in cluster.topics():
            cluster.create_topic(self.topic, queues=queues, compacted=True, allow_null_values=True)

    def body_of(self, result: StoredResult) -> bytes:
        """A result as bytes. Raises: Rejected for one of a type that the codec does not take."""
        return self._codec.encode(result._asdict())

    def store(self, producer: Producer, task_id: str, body: bytes | None) -> None:
        """Store a result, durably. Args: `body`: None: the task has no result any more. Raises: RayMQError."""
        properties = {CONTENT_TYPE: self._codec.name}
        producer.send(
            self.topic, body, key=task_id.encode(), index_keys=(task_id,), properties=properties
        ).result(STORE_TIMEOUT_S)

    def find(self, task_id: str) -> StoredResult | None:
        """The result of a task; None: there is none (yet). Raises: RayMQError."""
        found = self._cluster.query(self.topic, key=task_id)
        # Compaction runs now and then: there may be older ones.
        return None if not found or found[-1].is_null else self._decoded(found[-1])

    def _decoded(self, message: ReceivedMessage) -> StoredResult:
        name = message.properties.get(CONTENT_TYPE, self._codec.name)
        used = self._codec if name == self._codec.name else codec(name)
        fields = used.decode(message.body)
        return StoredResult(**{name: fields[name] for name in StoredResult._fields})
