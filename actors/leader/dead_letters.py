"""The dead letters of groups on this shard, for a leader: lists them, reads them, puts them back."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Mapping

import numpy as np
import pyarrow as pa

from raymq.store.base.failpoints import fail_point
from raymq.store.groups.leases.offsets import OffsetColumn
from raymq.store.queues.expression_filter import expression_filter
from raymq.store.queues.raw_records import decode_records
from raymq.store.records.requests import AppendedRows, MessageSelector
from raymq.store.services.leased_records import LeasedRecords, read_leased
from raymq.store.services.redrive import DeadQueue, Redriven, RedriveService

from .group_records import GroupHost

#: bytes of the records of one answer, about
ANSWER_BYTES = 1 << 20


#: how many dead letters a group has here, and the store times in ms of the oldest and the newest one, None: not known
DeadCount = tuple[int, int | None, int | None]


class DeadLetters:
    """Callers: any thread."""

    def __init__(
        self,
        leader: GroupHost,
        service: RedriveService,
        await_promise: Callable[[AppendedRows | None], None],
    ) -> None:
        self._leader = leader
        self._store = leader.store
        self._service = service
        self._await = await_promise

    def counts(self, group: str | None) -> dict[str, DeadCount]:
        """Group -> its dead letters, of those that have some. Args: `group`: only this one; None: all."""
        found = {}
        for name in self._service.groups() if group is None else [group]:
            queues = [each for each in self._service.queues(name) if each.count]
            if queues:
                oldest = [self._time(each, each.oldest) for each in queues]
                newest = [self._time(each, each.newest) for each in queues]
                found[name] = (
                    sum(each.count for each in queues),
                    min((each for each in oldest if each is not None), default=None),
                    max((each for each in newest if each is not None), default=None),
                )
        return found

    def _time(self, queue: DeadQueue, offset: int) -> int | None:
        topic, queue_id = queue.key
        place = self._store.query.oldest_of(topic, {queue_id: offset})
        return None if place is None else self._store.query.store_time_at(place)

    def read(
        self,
        group: str,
        begin: Mapping[int, int],
        max_records: int,
        selector: MessageSelector | None,
        *,
        with_records: bool,
    ) -> dict[str, object]:
        """Some dead letters of a group, the first ones of each queue. Looks at a part of each queue at a time.

        Args: `begin`: queue -> from which offset on. `with_records`: also what they say.
        Returns: `found`, of each its queue, its offset and its record in base64, None: it is damaged; `next`: queue ->
        where to go on; `more`: whether some are left there.
        """
        found: list[list[object]] = []
        following: dict[str, int] = {}
        left_bytes, has_more = ANSWER_BYTES, False
        for queue in self._service.queues(group):
            queue_id = queue.key[1]
            at = begin.get(queue_id, 0)
            offsets, stop = queue.next_of(at)
            room = max_records - len(found)
            if not room or left_bytes <= 0:
                following[str(queue_id)] = at
                has_more |= len(offsets) > 0
                continue

            if selector is None and not with_records:
                shown = offsets[:room]
                found += [[queue_id, offset, None] for offset in shown.tolist()]
                read_to = int(shown[-1]) + 1 if len(shown) < len(offsets) else stop
            else:
                part = read_leased(self._store, queue.key, offsets, left_bytes)
                rows, more = _rows(part, selector, room)
                rest = int(part.rest[0]) if len(part.rest) else stop
                read_to = rest if more is None else more
                for offset, record in rows:
                    size = 0 if record is None else len(record)
                    left_bytes -= size
                    text = b64encode(record).decode() if record and with_records else None
                    found.append([queue_id, offset, text])
            following[str(queue_id)] = read_to
            has_more |= read_to < queue.stop or bool((queue.passed >= read_to).any())
        return {"found": found, "next": following, "more": has_more}

    def redrive(
        self,
        group: str,
        session: bytes,
        settle: int,
        offsets: Mapping[int, OffsetColumn],
        topic: str | None,
        *,
        is_trial: bool,
    ) -> Redriven:
        """Put dead letters back. See `RedriveService.redrive`."""
        self._leader.check_serving()
        done = self._service.redrive(
            *(group, session, settle, offsets),
            topic=topic,
            find=self._store.query,
            is_trial=is_trial,
        )
        fail_point("groups.redrive_appended")
        self._await(None if done.decision is None else done.decision.appended)
        return done


def _rows(
    part: LeasedRecords, selector: MessageSelector | None, room: int
) -> tuple[list[tuple[int, bytes | None]], int | None]:
    """(offset, record) of those that a filter wants, at most `room`, ascending; and where the next read begins.

    None for a damaged record, which no filter knows. The place is None if all were looked at.
    """
    records = pa.concat_arrays(part.records) if part.records else pa.array([], pa.binary())
    is_wanted = np.ones(len(records), np.bool_)
    if selector is not None and len(records):
        properties = decode_records(records, columns=("properties",)).column("properties")
        wanted = expression_filter(*selector)
        if wanted.needs_records:
            is_wanted = wanted.records(properties)
    kept = np.flatnonzero(is_wanted)
    rows: list[tuple[int, bytes | None]] = [
        (int(part.offsets[each]), records[int(each)].as_py()) for each in kept[: room + 1].tolist()
    ]
    if selector is None:
        rows += [(offset, None) for offset in part.damaged]
    rows.sort(key=lambda row: row[0])
    return rows[:room], rows[room][0] if len(rows) > room else None
