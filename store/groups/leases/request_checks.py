"""What the machine of leases takes of workers and operators: the log can say all that passes here.

A record that a replica cannot read would end the whole shard. So numbers have ranges, columns have bounds, and offsets
ascend, whichever program has sent them.
"""

from __future__ import annotations

import numpy as np

from raymq.store.base.errors import Rejected
from raymq.store.state.topics import QueueKey

from .entries import SettleOutcome
from .offsets import NO_OFFSETS, OFFSET_MAX, PACKED_MAX, OffsetColumn
from .options import MS_MAX, check_range
from .packing import SESSION_BYTES_MAX
from .requests import LeaseRequest, SettleItem, SettleRequest

#: items of one request that settles
ITEMS_MAX = 10_000
#: a text has its length in 2 bytes, as the number of groups of a settlement
_SHORT_MAX = (1 << 16) - 1
#: what a worker may say of a message
_VERDICTS = (
    SettleOutcome.ACKED,
    SettleOutcome.NACKED,
    SettleOutcome.RETURNED,
    SettleOutcome.REJECTED,
)


def check_lease(request: LeaseRequest) -> None:
    """Raises: Rejected for a request that no record could say."""
    check_session(request.session)
    check_range("request", request.request, 0, OFFSET_MAX)
    check_range("max_records", request.max_records, 0, OFFSET_MAX)
    if request.lease_ms is not None:
        check_length(request.lease_ms)


def checked_items(request: SettleRequest) -> list[SettleItem]:
    """The items of a request, with the offsets of each ascending and without repetition.

    Raises: Rejected for a request that no record could say.
    """
    check_session(request.session)
    check_range("settle", request.settle, 0, OFFSET_MAX)
    check_range("items", len(request.items), 0, ITEMS_MAX)
    check_range("offsets", sum(len(each.offsets) for each in request.items), 0, PACKED_MAX)
    return [_checked(item) for item in request.items]


def _checked(item: SettleItem) -> SettleItem:
    check_range("lease", item.number, 0, OFFSET_MAX)
    check_key(item.key)
    if item.verdict not in _VERDICTS:
        raise Rejected("no verdict of a worker", field="verdict", found=int(item.verdict))
    if item.delay_ms is not None:
        check_range("delay_ms", item.delay_ms, 0, MS_MAX)
    return item._replace(offsets=checked_offsets(item.offsets))


def checked_offsets(offsets: OffsetColumn) -> OffsetColumn:
    """Offsets ascending, without repetition. Raises: Rejected for what is none."""
    found = np.asarray(offsets)
    if not len(found):
        return NO_OFFSETS
    if found.dtype.kind not in "iu":
        raise Rejected("offsets are whole numbers", field="offsets", found=str(found.dtype))
    check_range("offsets", int(found.min()), 0, OFFSET_MAX)
    check_range("offsets", int(found.max()), 0, OFFSET_MAX)
    found = found.astype(np.int64)
    return found if (np.diff(found) > 0).all() else np.unique(found)


def check_groups(count: int) -> None:
    """Raises: Rejected for more groups than one settlement can have: outcome, lease, queue and delay of each."""
    check_range("items", count, 0, _SHORT_MAX)


def check_session(session: bytes) -> None:
    """Raises: Rejected for an id that is too long."""
    check_range("session_bytes", len(session), 0, SESSION_BYTES_MAX)


def check_length(lease_ms: int) -> None:
    """Raises: Rejected for the length of a lease that no record could say."""
    check_range("lease_ms", lease_ms, 1, MS_MAX)


def check_key(key: QueueKey) -> None:
    """Raises: Rejected for a queue that no record could name."""
    topic, queue_id = key
    if topic.encode(errors="replace").decode() != topic:
        raise Rejected("a topic has a name in UTF-8", field="topic", found=ascii(topic)[:100])
    check_range("topic_bytes", len(topic.encode()), 0, _SHORT_MAX)
    check_range("queue", queue_id, 0, (1 << 32) - 1)
