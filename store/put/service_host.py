"""What the store's services need of the store that they belong to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from raymq.store.base.clock import Clock, StoreTimeClock
from raymq.store.base.files import Files
from raymq.store.config.running_config import RunningConfig
from raymq.store.groups.claims import ClaimTable
from raymq.store.groups.group_table import GroupTable
from raymq.store.groups.leases.lease_table import LeaseTable
from raymq.store.log.commit_log import CommitLog
from raymq.store.queues.consume_queues import ConsumeQueues
from raymq.store.queues.message_filter import LookLimit, MessageFilter
from raymq.store.records.requests import AppendedRows, FetchSlice, PutRequest
from raymq.store.state.shard_state import ShardState

from .inner_message import InnerMessage, ServiceProgress
from .inner_put import InnerPut
from .put_path import PutPath
from .topic_records import TopicRecords


class ServiceHost(Protocol):
    """The store of a service: `MessageStore`, which describes each of these."""

    config: RunningConfig
    files: Files
    clock: Clock
    log: CommitLog
    state: ShardState
    groups: GroupTable
    claims: ClaimTable
    leases: LeaseTable
    inner_put: InnerPut
    put_path: PutPath
    consume_queues: ConsumeQueues
    store_times: StoreTimeClock
    topics: TopicRecords
    #: each returns the physical offset from which it still needs records; None: it needs none
    retention_floors: list[Callable[[], int | None]]

    @property
    def state_is_whole(self) -> bool:
        """Whether the log holds all of the state."""

    def put(self, request: PutRequest) -> AppendedRows:
        """Check and append one batch of one queue."""

    def put_inner(
        self, messages: Sequence[InnerMessage], *, progress: ServiceProgress | None = None
    ) -> list[AppendedRows]:
        """Append messages of the store's own services."""

    def note_feature_level(self, level: int) -> None:
        """Write that the log uses a level of features, unless it says so."""

    def commit_offsets(self, group: str, topic: str, offsets: dict[int, int]) -> AppendedRows:
        """Store a group's next offsets in the log."""

    def queues(self) -> list[tuple[str, int]]:
        """Every (topic, queue) that has a consume queue."""

    def queue_range(self, topic: str, queue_id: int) -> tuple[int, int]:
        """The half-open range of readable offsets of a queue."""

    def fetch(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        *,
        max_bytes: int,
        max_records: int,
        wanted: MessageFilter | None = None,
        look: LookLimit | None = None,
    ) -> FetchSlice:
        """Records of a queue that are not checked."""

    def fetch_whole(
        self, topic: str, queue_id: int, offset: int, *, max_bytes: int, max_records: int
    ) -> FetchSlice:
        """Records of a queue, up to the first damaged one. Raises: Corrupt if that is the one at `offset`."""

    def sync_queues(self) -> None:
        """fdatasync every consume queue and the index. Raises: OSError if a sync failed."""
