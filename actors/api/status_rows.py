"""What the status of a replica consists of: the rows of the operations `status` and `leader`."""

from __future__ import annotations

from typing import Any, TypedDict


class LeaderRow(TypedDict):
    """Who leads a shard, as far as one replica knows."""

    replica: int | None
    epoch: int
    endpoint: str | None
    #: how often a majority of the replicas was lost
    unclean_recoveries: int


class LastRecovery(TypedDict):
    """How the last start recovered the log."""

    #: of the recovery table
    row: str
    end: int


class ReplicaRow(TypedDict):
    """The status of any replica. That of its identity comes before it, that of its role after it."""

    mode: str
    state: str
    error: str | None
    #: part -> cause
    failures: dict[str, str]
    appended: int
    synced: int
    confirmed: int
    dispatched: int
    epoch: int
    leader: int | None
    is_complete: bool
    #: the other replicas that this one cannot call
    uncallable: list[int]
    unclean_recoveries: list[dict[str, Any]]
    recovery: LastRecovery | None
    scrub: dict[str, Any]
    repair: dict[str, Any] | None
    supervisor: dict[str, Any]


class LeadingRow(TypedDict):
    """What a replica that leads adds to its status."""

    writable: bool
    min_offset: int
    transient_pool: bool
    committed: int
    prewritten_bytes: int
    counters: dict[str, int]
    damage: list[dict[str, Any]]
    compaction: dict[str, Any]
    metrics: dict[str, Any]
    #: names of those that are set
    flags: list[str]
    clean: dict[str, Any]
    upkeep: dict[str, Any]
    store_stats: dict[str, Any]
