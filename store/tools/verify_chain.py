"""The chain's own files: whole units, one after the other, up to the end of RayMQ's appends.

`log_scan` compares the log's bytes with the units. Here the units are compared with each other. After a crash the chain
may be old, torn or gone, and the next start completes it. So it is checked only after an orderly stop.
"""

from __future__ import annotations

import bisect
import itertools

from raymq.store.base.checksum import crc32c
from raymq.store.base.errors import Corrupt
from raymq.store.base.rules import COVERAGE_RULE
from raymq.store.log.chain import CHAIN_UNIT_BYTES, ChainUnit, unpack_units
from raymq.store.log.segments.segment_paths import offset_names

from .read_only import ReadOnlyStore

FOLLOWS_RULE = "a chain unit continues the one before"
WHOLE_RULE = "chain files hold whole units"


def crc_is_wrong(store: ReadOnlyStore, offset: int) -> bool:
    """Whether the unit that starts at `offset` is damaged, and not the log's bytes.

    If its CRC is replaced by that of the log's bytes, such a unit has the chain value that the next unit continues.
    """
    if store.log is None or not store.segment_size_bytes:
        return False

    directory = store.root / "raymq" / "chain"
    names = offset_names(directory, files=store.files)
    at = bisect.bisect_right([int(name) for name in names], offset) - 1
    units = []
    for name in names[max(at, 0) : at + 2]:
        units += unpack_units(store.files.read_file(directory / name))

    for unit, following in itertools.pairwise(units):
        file = store.log.find(unit.start)
        if unit.start == offset and file is not None and unit.end <= file.start + file.size:
            try:
                crc = crc32c(file.read(unit.start - file.start, unit.end - file.start))
            except Corrupt:
                # The log's bytes are damaged.
                return False
            expected = unit._replace(crc=crc)
            return following.start == unit.end and following.previous == expected.value

    return False


def check_chain(store: ReadOnlyStore) -> None:
    """Add every fault of `raymq/chain`. A store of RocketMQ, and one that crashed, is not checked."""
    directory = store.root / "raymq" / "chain"
    if not store.is_own_store or store.crashed or not store.segment_size_bytes:
        return

    last: ChainUnit | None = None
    for name in offset_names(directory, files=store.files):
        path = directory / name
        data = store.files.read_file(path)
        torn_bytes = len(data) % CHAIN_UNIT_BYTES
        if torn_bytes:
            store.faults.add(path, len(data) - torn_bytes, WHOLE_RULE, "the last is torn")
        for index, unit in enumerate(unpack_units(data)):
            if not unit.follows(last, int(name), store.segment_size_bytes):
                before = "is none" if last is None else f"ends at {last.end} with {last.value:#x}"
                detail = (
                    f"unit [{unit.start}, {unit.end}), chain value before it {unit.previous:#x}; "
                    f"the one before {before}"
                )
                store.faults.add(path, index * CHAIN_UNIT_BYTES, FOLLOWS_RULE, detail)
                return
            last = unit

    end = store.start if last is None else last.end
    # Records that RocketMQ appended have no unit before RayMQ's next start.
    ours = min(store.end, store.marks.appended_end)
    if end < ours:
        store.faults.add(
            directory, end, COVERAGE_RULE, f"its units end at {end}, our log at {ours}"
        )
