"""Finds the end of a log and makes the decision about it, without writing. Recovery and `verify` share it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from raymq.store.base import format as fmt
from raymq.store.base.checksum import crc32c
from raymq.store.base.errors import Corrupt
from raymq.store.base.files import ZERO_CHUNK_BYTES, Files, only_zeros
from raymq.store.log.chain import Chain
from raymq.store.log.record_reads import WalkedPiece, walk_piece
from raymq.store.log.segments.log_files import read_of
from raymq.store.log.segments.mapped_file import MappedFile
from raymq.store.log.segments.mapped_file_queue import MappedFileQueue
from raymq.store.log.segments.segment_paths import segment_start_of
from raymq.store.records import record

from .recovery_table import UNREADABLE, Facts, RecoveryRow, decide, written_until

#: bytes searched at a time for a record's magic
SEARCH_BYTES = 8 << 20
#: bytes walked at a time
SCAN_BYTES = 8 << 20
#: an end above every offset
NO_TOP = sys.maxsize
#: unreadable bytes are skipped in such steps: a page is lost with each bad sector
UNREADABLE_STEP_BYTES = 4096

#: called with a piece of a segment, its physical offset, and its valid records
Visit = Callable[[memoryview, int, record.Walk], None]
#: whether a consume queue has a unit of a position and size
HasUnit = Callable[[int, int], bool]


class NotedEnds(NamedTuple):
    """The facts about a log in `raymq/meta` and `raymq/marks`: its writer, the boot, and the ends."""

    #: as `CommitLog.is_own_store`
    own: bool
    same_boot: bool
    synced: int
    #: the end below which a log that RocketMQ wrote may have acknowledged records
    appended: int


class Scan(NamedTuple):
    """The result of a scan: the end of a log."""

    #: start of the walk
    begin: int
    end: int
    #: chain units prove all bytes below this
    proven_end: int
    #: why the walk ended
    fault: str
    #: the decision about the end
    row: RecoveryRow


def foreign_end(segments: MappedFileQueue, queues_end: int, *, crashed: bool) -> int:
    """The end below which a log that RocketMQ wrote may have acknowledged records.

    Args: `queues_end`: the end of the last record that a consume queue knows. After a crash queues may lack records.
    """
    if crashed:
        return segments.files[-1].start + segments.file_size if segments.files else 0
    return queues_end


def scan(
    segments: MappedFileQueue,
    chain: Chain | None,
    known: NotedEnds,
    *,
    files: Files,
    scan_from: int = 0,
    visit: Visit | None = None,
    top: int = NO_TOP,
    has_unit: HasUnit = lambda position, size: False,
) -> Scan:
    """Walk from `scan_from`, where a record starts, to the end of the log, and decide about that end.

    Loads the chain. Units below `scan_from` are not read. Args: `visit`: called with the valid records of each piece
    of each file in order. `top`: bytes from here on do not count, since an interrupted cut is removing them.
    `has_unit`: whether a consume queue knows a record of that position and size.
    """
    size = segments.file_size
    known = known._replace(synced=min(known.synced, top), appended=min(known.appended, top))
    proven_end, differs = _compare_chain(segments, chain, known, scan_from)
    limit = top if differs is None else min(differs, top)
    end = begin = segments.min_offset
    walked = _Walked(end, record.WalkStop.BLANK, "the log ends")

    for file in segments.files:
        if file.start + size <= scan_from:
            end = begin = file.start + size
            continue
        at = max(file.start, scan_from)
        if at > file.start:
            begin = scan_from
        stop = max(0, min(size, limit - file.start))
        walked = _walk_file(segments, at, file.start + stop, known.own, proven_end, visit, has_unit)
        end = walked.end
        if walked.reason is not record.WalkStop.BLANK:
            break
        # A blank record fills the rest of its file: the log continues in the next one.
        end = file.start + size

    fault = "bytes differ from their chain unit" if walked.end == differs else walked.fault
    if walked.reason is record.WalkStop.UNREADABLE:
        return Scan(begin, end, proven_end, fault, UNREADABLE)

    dirty, later = _after_end(segments, files, end, top)
    facts = Facts(
        own=known.own,
        same_boot=known.same_boot,
        below_synced=end < known.synced,
        below_appended=end < known.appended,
        dirty=dirty,
        later_valid=later,
    )
    return Scan(begin, end, proven_end, fault, decide(facts))


class _Walked(NamedTuple):
    """The end of the walk over one file, and the reason."""

    end: int
    reason: record.WalkStop
    fault: str


def _walk_file(
    segments: MappedFileQueue,
    at: int,
    stop: int,
    own: bool,
    proven_end: int,
    visit: Visit | None,
    has_unit: HasUnit,
) -> _Walked:
    """Walk the records of one file from `at`, where a record starts, to `stop`."""
    reason = record.WalkStop.STOPPED
    fault = reason.value

    while at < stop:
        piece = walk_piece(partial(read_of, segments, end=at), at, stop, nbytes=SCAN_BYTES)
        walk = piece.walk
        reason, fault = walk.reason, walk.reason.value
        if not len(walk.positions) and reason is record.WalkStop.WRONG_POSITION:
            found = _with_wrong_position(segments, at, stop, own, proven_end, has_unit)
            if found is not None:
                piece, walk = found, found.walk
                reason = record.WalkStop.STOPPED

        if own:
            written = written_until(piece.view, piece.base, walk, proven_end)
            if written < len(walk.positions):
                fault = "a record's topic or properties were never written"
                reason = record.WalkStop.SHORT
                walk = record.Walk(
                    walk.positions[:written],
                    walk.sizes[:written],
                    int(walk.positions[written]),
                    record.WalkStop.STOPPED,
                )

        if visit is not None and len(walk.positions):
            visit(piece.view, piece.base, walk)
        at = walk.end
        if reason is record.WalkStop.WRONG_POSITION and len(walk.positions):
            # The next turn looks at that record alone.
            continue
        if reason is not record.WalkStop.STOPPED:
            break

    return _Walked(at, reason, fault)


def _with_wrong_position(
    segments: MappedFileQueue, at: int, stop: int, own: bool, proven_end: int, has_unit: HasUnit
) -> WalkedPiece | None:
    """The record at `at`, if only its physical offset is damaged; None: it is a leftover, or RayMQ's own damage.

    RocketMQ compares that field with nothing. The record belongs to the log if a chain unit proves its bytes. In a log
    that RocketMQ wrote, it does if a consume queue knows it, or if a record follows it at once that names its place.
    """
    read = partial(read_of, segments, end=stop)
    piece = walk_piece(read, at, stop, limit=1, check_position=False)
    if not len(piece.walk.positions):
        return None
    end = piece.walk.end
    if own:
        return piece if end <= proven_end else None
    if has_unit(at, end - at):
        return piece
    following = walk_piece(read, end, stop, limit=1).walk if end < stop else None
    if following is None:
        return None
    is_blank = following.reason is record.WalkStop.BLANK
    return piece if len(following.positions) or is_blank else None


def _compare_chain(
    segments: MappedFileQueue, chain: Chain | None, known: NotedEnds, scan_from: int
) -> tuple[int, int | None]:
    """Load the chain and compare it with the bytes from `scan_from` on.

    Returns: the end of the bytes that units prove, and the start of the first unit whose bytes differ.
    """
    proven_end = segments.min_offset
    if chain is None:
        return proven_end, None

    verify_from = scan_from
    if not known.same_boot:
        # Chain files are synced when they are closed, so any page of the last two may be missing.
        file_start = segment_start_of(scan_from, segments.file_size)
        verify_from = max(0, file_start - segments.file_size)

    chain.load(verify_from)
    head = chain.unit_at(proven_end)
    if head is None or head.start != proven_end:
        # Units of deleted files do no harm, but the present files need theirs.
        return proven_end, None

    first, last = chain.unit_at(scan_from), chain.last
    if first is None:
        return (proven_end if last is None else last.end), None
    proven_end = first.start
    top = segments.files[-1].start + segments.file_size if segments.files else 0

    for unit in chain.iter_units(proven_end, top):
        file = segments.find(unit.start)
        if unit.start != proven_end or file is None:
            break
        try:
            same = crc32c(read_of(segments, unit.start, unit.end, unit.end)) == unit.crc
        except Corrupt:
            # The walk reads the same bytes, and reports them.
            break
        if not same:
            # A leader's unit may span this replica's synced end: the unit's synced records stay.
            spans = unit.start < known.synced < unit.end and not known.same_boot
            return proven_end, unit.start if known.own and not spans else None
        proven_end = unit.end

    return proven_end, None


def _after_end(segments: MappedFileQueue, files: Files, end: int, top: int) -> tuple[bool, bool]:
    """Whether non-zero bytes follow the end, and whether a valid record starts after it."""
    dirty = later = False
    for file in segments.files:
        if file.start + file.size > end and _has_bytes(files, file, max(end, file.start), top):
            dirty = True
            # The scan found the record at the end itself bad.
            at = max(end + 1, file.start)
            later = later or _first_valid(segments, file, at, top) is not None
    return dirty, later


def _has_bytes(files: Files, file: MappedFile, offset: int, top: int) -> bool:
    """Whether a file has a non-zero byte from `offset` on, and below `top`.

    Only bytes outside of holes are read: the holes of a fresh 1 GiB file took 3 s to read, and 8 times as long
    through a map.
    """
    stop = min(file.size, top - file.start)
    with files.opened(file.path, writable=False) as fd:
        for begin, end in files.data_ranges(fd, offset - file.start, stop):
            for position in range(begin, end, ZERO_CHUNK_BYTES):
                upto = min(end, position + ZERO_CHUNK_BYTES)
                try:
                    chunk = files.read_range(fd, position, upto, path=file.path, base=file.start)
                except Corrupt:
                    # Unreadable bytes were once written.
                    return True
                if not only_zeros(chunk):
                    return True
    return False


def _first_valid(segments: MappedFileQueue, file: MappedFile, offset: int, top: int) -> int | None:
    """The first record of a file, from `offset` on, with a right magic, length, position and body CRC."""
    end = file.start + file.size
    stop = max(file.start, min(end, top))
    low = offset
    while low < stop:
        # The last candidate's magic may be in the next piece.
        high = min(stop, low + SEARCH_BYTES + fmt.BLANK_BYTES - 1)
        piece = _read_or_zeros(segments, low, high, end)
        found: list[int] = []
        for magic in record.MAGICS:
            found += [at - 4 for at in _positions_of(piece, magic) if at >= 4]

        for start in sorted(found):
            first = walk_piece(partial(read_of, segments, end=end), low + start, stop, limit=1)
            if len(first.walk.positions):
                return low + start
        low += SEARCH_BYTES

    return None


def _read_or_zeros(segments: MappedFileQueue, low: int, high: int, end: int) -> bytes:
    """Bytes [low, high), with zeros in place of unreadable pages."""
    try:
        return read_of(segments, low, high, end)
    except Corrupt:
        parts = []
        while low < high:
            stop = min(high, low - low % UNREADABLE_STEP_BYTES + UNREADABLE_STEP_BYTES)
            try:
                parts.append(read_of(segments, low, stop, end))
            except Corrupt:
                parts.append(bytes(stop - low))
            low = stop
        return b"".join(parts)


def _positions_of(data: bytes, wanted: bytes) -> Iterator[int]:
    at = data.find(wanted)
    while at >= 0:
        yield at
        at = data.find(wanted, at + 1)


def next_record(segments: MappedFileQueue, offset: int, top: int = NO_TOP) -> int | None:
    """The first whole record of the log from `offset` on and below `top`, as `_first_valid` finds it."""
    for file in segments.files:
        if file.start + file.size > offset and file.start < top:
            found = _first_valid(segments, file, max(offset, file.start), top)
            if found is not None:
                return found
    return None
