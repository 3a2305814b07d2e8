"""The user's properties of many messages as columns: names, values, and the row of each."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from raymq.store.records.property_columns import PropertyColumns

from .message import SYSTEM_PROPERTIES


def user_properties(
    properties: PropertyColumns,
) -> tuple[npt.NDArray[np.int64], pa.Array, pa.Array]:
    """The row, name and value of every property that does not belong to the system. Values are binary."""
    return properties.pairs_without(SYSTEM_PROPERTIES)


def as_text(data: pa.Array) -> pa.Array:
    """Binary as text, where bytes that are not UTF-8 are replaced."""
    try:
        return data.cast(pa.string())
    except pa.ArrowInvalid:
        found = [
            None if each is None else str(each, "utf-8", "replace") for each in data.to_pylist()
        ]
        return pa.array(found, pa.string())


def split_texts(texts: pa.Array, separator: str) -> tuple[npt.NDArray[np.int64], pa.Array]:
    """All parts of the texts, and the row of each part. A null has no part."""
    lists = pc.split_pattern(texts, separator)
    rows = pc.list_parent_indices(lists).to_numpy(zero_copy_only=False).astype(np.int64)
    return rows, pc.list_flatten(lists)


def list_offsets(row_of_item: npt.NDArray[np.int64], rows: int) -> npt.NDArray[np.int32]:
    """The offsets of lists whose items are in the order of their rows."""
    counts = np.bincount(row_of_item, minlength=rows)
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)


def as_mask(flags: pa.Array) -> npt.NDArray[np.bool_]:
    mask: npt.NDArray[np.bool_] = flags.to_numpy(zero_copy_only=False)
    return mask
