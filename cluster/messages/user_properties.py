"""The user's properties of many messages as columns: names, values, and the row of each."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from .message import SYSTEM_PROPERTIES

_PAIR = r"^(?P<name>[^\x01]+)\x01(?P<value>(?s:.+))$"


def user_properties(properties: pa.Array) -> tuple[npt.NDArray[np.int64], pa.Array, pa.Array]:
    """The row, name and value of every property that does not belong to the system."""
    row_of_pair, pairs = split_texts(as_text(properties), "\x02")
    parts = pc.extract_regex(pairs, _PAIR)
    names, values = pc.struct_field(parts, 0), pc.struct_field(parts, 1)

    system = pa.array(sorted(SYSTEM_PROPERTIES))
    # `is_in` finds null in no set, so that a part without a name and a value is dropped by `is_valid`.
    kept = pc.and_(parts.is_valid(), pc.invert(pc.is_in(names, value_set=system)))
    row_of_pair, names, values = (
        row_of_pair[as_mask(kept)],
        names.filter(kept),
        values.filter(kept),
    )

    last = _last_of_each(row_of_pair, names)
    return row_of_pair[last], names.take(pa.array(last)), values.take(pa.array(last))


def _last_of_each(row_of_pair: npt.NDArray[np.int64], names: pa.Array) -> npt.NDArray[np.int64]:
    """The places of the pairs to keep: of two properties of one name the last one wins, as in `properties.decode`."""
    coded = names.dictionary_encode()
    codes = row_of_pair * max(1, len(coded.dictionary)) + coded.indices.to_numpy()
    _, from_behind = np.unique(codes[::-1], return_index=True)
    return np.sort(len(codes) - 1 - from_behind).astype(np.int64)


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
