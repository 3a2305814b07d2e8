"""What queues have for workers: the messages of a queue that were never leased, with their filter, sizes and keys."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from raymq.store.base.errors import Corrupt, OffsetOutOfRange
from raymq.store.base.format import RETRY_PREFIX
from raymq.store.groups.leases.key_order import slots_of
from raymq.store.groups.leases.offsets import NO_OFFSETS
from raymq.store.groups.leases.options import LEASE_OFFSETS_MAX
from raymq.store.groups.leases.queue_columns import ATTEMPTS_MAX
from raymq.store.groups.leases.requests import Offer
from raymq.store.put.service_host import ServiceHost
from raymq.store.queues.expression_filter import expression_filter
from raymq.store.queues.message_filter import LookLimit
from raymq.store.queues.raw_records import decode_records
from raymq.store.records.requests import MessageSelector
from raymq.store.state.topics import QueueKey

from .stored_message import StoredMessage, read

#: properties with a message's key, as text or in base64: a key has one of these forms
KEY_PROPERTIES = ("__SHARDINGKEY", "__KEY_B64")
#: messages whose keys are looked at together
KEYS_READ_MAX = 1_000
#: messages that were never leased, at which one request looks at least: others may take the first ones meanwhile
LOOK_OFFSETS_MIN = 256
#: how long one request looks for messages that a filter wants
LOOK_MS = 50


class Wanted(NamedTuple):
    """How much of a queue a request looks at, and for what."""

    max_records: int
    max_bytes: int
    #: None: all messages
    selector: MessageSelector | None
    #: the keys of messages count
    has_keys: bool


class LeaseOffers:
    """Looks at queues, without the put lock. Threads: any may call."""

    def __init__(self, store: ServiceHost) -> None:
        self._store = store

    def look(self, key: QueueKey, first: int, end: int, wanted: Wanted) -> Offer:
        """What of a queue was never leased, with what the machine needs to know of these messages."""
        ahead = min(LEASE_OFFSETS_MAX, max(LOOK_OFFSETS_MIN, 2 * wanted.max_records))
        stop = max(first, min(end, first + ahead))
        if first == stop:
            return Offer(key, NO_OFFSETS, first, stop)

        matches = None
        is_retry = key[0].startswith(RETRY_PREFIX)
        if wanted.selector is not None and not is_retry:
            # Messages of the retry topic matched before.
            matches = self._matching(key, first, wanted, wanted.selector)
            stop = first + len(matches)
        else:
            stop = self._within_bytes(key, first, stop, wanted.max_bytes)
        if first == stop or not (is_retry or wanted.has_keys):
            return Offer(key, NO_OFFSETS, first, stop, matches=matches)

        found = self.read(key, first, stop)
        stop = first + len(found)
        times = [0 if each is None else each.reconsume_times for each in found]
        # A sender of RocketMQ may have set any number.
        tries = np.clip(times, 0, ATTEMPTS_MAX).astype(np.uint16)
        return Offer(
            *(key, NO_OFFSETS, first, stop),
            matches=None if matches is None else matches[: len(found)],
            slots=slots_of(list(map(key_of, found))) if wanted.has_keys else None,
            attempts=tries if is_retry else None,
        )

    def _within_bytes(self, key: QueueKey, first: int, stop: int, max_bytes: int) -> int:
        """The offset before which messages of a queue have so many bytes, after at least one."""
        try:
            units = self._store.consume_queues.get(*key).read(first, stop - first)
        except (Corrupt, OffsetOutOfRange):
            # The worker that leases them hears of it.
            return stop
        ends = units["size"].cumsum(dtype=np.int64)
        return min(stop, first + max(1, int(ends.searchsorted(max_bytes, side="right"))))

    def _matching(
        self, key: QueueKey, first: int, wanted: Wanted, selector: MessageSelector
    ) -> npt.NDArray[np.bool_]:
        """Which of the next messages of a queue a filter wants, as far as one request looks."""
        clock = self._store.clock
        over_ms = clock.monotonic_ms() + LOOK_MS
        look = LookLimit(LEASE_OFFSETS_MAX, lambda: clock.monotonic_ms() >= over_ms)
        try:
            found = self._store.fetch(
                *(*key, first),
                max_bytes=wanted.max_bytes,
                max_records=wanted.max_records,
                wanted=expression_filter(*selector),
                look=look,
            )
        except Corrupt:
            # Nothing is known of it: a worker gets it, and hears of the damage.
            return np.ones(1, np.bool_)
        except OffsetOutOfRange:
            return np.zeros(0, np.bool_)

        matches = np.zeros(found.next_offset - first, np.bool_)
        if found.records is not None and len(found.records):
            rows = decode_records(found.records, columns=("queue_offset",))
            matches[rows.column("queue_offset").to_numpy() - first] = True
        return matches

    def read(self, key: QueueKey, first: int, stop: int) -> list[StoredMessage | None]:
        """Some messages of a queue that follow each other, the first ones; None: one cannot be read."""
        try:
            most = min(stop - first, KEYS_READ_MAX)
            found, _ = read(self._store, *key, first, max_records=most)
        except (Corrupt, OffsetOutOfRange):
            return [None]
        whole: list[StoredMessage | None] = []
        for each in found:
            gap = each.queue_offset - first - len(whole)
            whole += [None] * min(gap, most - len(whole))
            if len(whole) < most:
                whole.append(each)
        return whole or [None]


def key_of(message: StoredMessage | None) -> bytes:
    """What stands for a message's key; empty: it has none, or cannot be read."""
    found = {} if message is None else message.properties
    return next((found[name].encode() for name in KEY_PROPERTIES if name in found), b"")
