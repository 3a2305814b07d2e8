"""The content of a table of producers, to be compared."""

from __future__ import annotations

from typing import Any

from raymq.store.state.producer_table import EntryKey, ProducerTable


def entries_of(table: ProducerTable) -> dict[EntryKey, tuple[Any, ...]]:
    """Each entry: its next sequence, its end, the first run and the newest. The runs between do not count."""
    keys = [
        (int(row["producer"]), *table.queues[int(row["queue"])])
        for rows in table.entries()
        for row in rows
    ]
    found = {}
    for key in keys:
        entry = table.get(key)
        assert entry is not None
        found[key] = (entry.next_sequence, entry.end_offset, entry.runs[:1], entry.runs[-1:])
    return found


def epochs_of(table: ProducerTable) -> dict[int, int]:
    """The epoch of each producer."""
    return {int(row["producer"]): int(row["epoch"]) for rows in table.epoch_rows() for row in rows}


def known(table: ProducerTable) -> tuple[dict[EntryKey, tuple[Any, ...]], dict[int, int]]:
    """All that a table knows."""
    return entries_of(table), epochs_of(table)
