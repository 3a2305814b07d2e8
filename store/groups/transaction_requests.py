"""What a client asks of a shard about a transaction, and the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from raymq.store.records.requests import PutRequest

from .claims import Commit
from .leases.requests import SettleItem

#: decisions
COMMITTED, REFUSED, ABORTED = "committed", "refused", "aborted"


class TransactionName(NamedTuple):
    """What a transaction is recognised by."""

    #: 16 random bytes
    session: bytes
    #: of the session, from 1 on
    number: int


class OffsetCommit(NamedTuple):
    """Offsets of a member of a consumer group, in one topic."""

    group: str
    topic: str
    commits: Mapping[int, Commit]


class GroupAcks(NamedTuple):
    """Messages that workers of a group have done."""

    group: str
    items: Sequence[SettleItem]


@dataclass(frozen=True)
class TransactionCommit:
    """A transaction that is to be committed."""

    name: TransactionName
    #: rows without a producer: the name is theirs. Each queue comes once
    puts: Sequence[PutRequest] = ()
    #: each group and topic once
    offsets: Sequence[OffsetCommit] = ()
    #: each group once
    acks: Sequence[GroupAcks] = ()


@dataclass(frozen=True)
class TransactionOutcome:
    """The first decision on a transaction. It counts when everything in the log is as durable as promised."""

    #: COMMITTED, REFUSED or ABORTED
    decision: str
    #: of COMMITTED: the queue offset of the first row of each put; the store time of all rows, ms since 1970
    first_offsets: Sequence[int] = ()
    store_time_ms: int = 0
    #: of REFUSED, as JSON takes it: [group, topic, queue, number and member of the claim that stands] of each queue
    fenced: Sequence[Any] = ()
    #: of REFUSED: [group, number of the lease, topic, queue, packed offsets in base64] of what leases do not hold
    lost: Sequence[Any] = ()
    #: an earlier request has decided so
    is_repeated: bool = False
