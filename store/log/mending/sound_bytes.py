"""What a replica gives to another one that lacks bytes: its own bytes, compared with its own chain before."""

from __future__ import annotations

from collections.abc import Sequence

from raymq.store.base.checksum import crc32c
from raymq.store.base.errors import Corrupt, OffsetOutOfRange, Rejected, ReplicaBehind
from raymq.store.base.rules import COVERAGE_RULE, CRC_RULE
from raymq.store.log.chain import ChainUnit
from raymq.store.log.commit_log import CommitLog
from raymq.store.log.segments.log_files import read_of
from raymq.store.log.segments.segment_paths import segment_start_of

from .chain_window import read_window
from .fitting import ChainWindow, SoundBytes, covers

#: most bytes of one answer
ANSWER_BYTES_MAX = 4 << 20


def mendable_end(log: CommitLog) -> int:
    """Bytes below this never change, so replicas that have them have the same."""
    return min(log.synced, log.confirmed)


def last_given_unit(log: CommitLog) -> ChainUnit | None:
    """The last unit that is given to others of a log of which a sync has failed: it holds the last synced byte.

    Its CRC proves what comes after that byte. None: nothing is given, because no unit says of which epoch that byte is.
    """
    return log.chain.unit_at(log.synced - 1) if log.synced > log.start else None


def given_end(log: CommitLog) -> int:
    """Bytes below this are given to other replicas.

    After a failed sync that is all that was synced: the log does not change any more, and no other replica may have it.
    """
    last = last_given_unit(log) if log.health.sync_failed else None
    return mendable_end(log) if last is None else last.end


def find_match(log: CommitLog, candidates: Sequence[tuple[int, int]]) -> int:
    """The last of these (unit end, chain value) that this log has below `given_end`; -1: none.

    Only a log of which a sync has failed is searched: it does not change meanwhile.
    """
    if not log.health.sync_failed:
        return -1
    end = given_end(log)
    for index in range(len(candidates) - 1, -1, -1):
        offset, value = candidates[index]
        if log.start <= offset <= end and log.chain.value_at(offset) == value:
            return index
    return -1


def window_of(log: CommitLog, start: int, stop: int) -> ChainWindow:
    """The chain units of [start, stop), as the files of this log's chain have them. Raises: FileNotFoundError."""
    size = log.config.segment_size_bytes
    return read_window(log.chain.directory, size, start, stop, files=log.files)


def read_sound_bytes(log: CommitLog, start: int, stop: int) -> SoundBytes:
    """Log bytes [start, stop), after all units that they are in were compared with their CRCs.

    Raises: Rejected for a range that is empty, too large or in two files. OffsetOutOfRange for deleted bytes.
    Unavailable for bytes above `given_end`. Corrupt if this replica's own bytes, or its chain, are damaged.
    """
    size = log.config.segment_size_bytes
    in_one_file = segment_start_of(start, size) == segment_start_of(max(start, stop - 1), size)
    if not 0 <= start < stop or stop - start > ANSWER_BYTES_MAX or not in_one_file:
        raise Rejected(
            f"[{start}, {stop}) is not a range of at most {ANSWER_BYTES_MAX} bytes of one file",
            field="stop",
            limit=ANSWER_BYTES_MAX,
        )

    if start < log.start:
        fault = f"the log begins at {log.start}; the bytes at {start} were deleted"
        raise OffsetOutOfRange(fault, min=log.start, max=log.end, offset=start)
    window = _window_below(log, start, stop, given_end(log))

    parts = []
    for unit in window.units:
        # Not through `log.reads`, which would ask the other replicas for damaged bytes.
        data = read_of(log.segments, unit.start, unit.end, log.end)
        if crc32c(data) != unit.crc:
            fault = f"the bytes [{unit.start}, {unit.end}) are damaged on this replica, too"
            raise Corrupt(fault, offset=unit.start, rule=CRC_RULE)
        parts.append(data[max(0, start - unit.start) : stop - unit.start])
    return SoundBytes(start, b"".join(parts), window.units)


def _window_below(log: CommitLog, start: int, stop: int, end: int) -> ChainWindow:
    """The linked chain units of [start, stop). Raises: Unavailable if they end above `end`, Corrupt without them."""
    if stop > end:
        fault = f"this replica has confirmed bytes up to {end} only"
        raise ReplicaBehind(fault, field="confirmed", limit=end)
    try:
        window = window_of(log, start, stop)
    except FileNotFoundError:
        window = ChainWindow(None, [], None)
    if not (window.is_linked and covers(window.units, start, stop)):
        fault = f"the chain of this replica does not cover the bytes [{start}, {stop})"
        raise Corrupt(fault, offset=start, rule=COVERAGE_RULE)
    return window
