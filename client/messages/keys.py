"""Message keys in the properties of a record: text unchanged, any other key in base64.

RocketMQ's property for the ordering key is `__SHARDINGKEY`. Properties hold text without \\x01 and \\x02 only, so other
keys go to `__KEY_B64`.
"""

from __future__ import annotations

import base64

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from raymq.store.base.errors import Rejected
from raymq.store.records.binary_columns import null_where, value_bytes, value_offsets
from raymq.store.records.property_columns import PropertyColumns

TEXT_KEY = "__SHARDINGKEY"
BASE64_KEY = "__KEY_B64"

_BYTES_OR_TEXT = (pa.binary(), pa.large_binary(), pa.string(), pa.large_string())


def is_text_key(key: bytes) -> bool:
    """Whether a properties string can hold the key unchanged."""
    if not key or b"\x01" in key or b"\x02" in key:
        return False
    try:
        key.decode()
    except UnicodeDecodeError:
        return False
    return True


def key_property(key: bytes) -> bytes:
    """The encoded property of a key."""
    if is_text_key(key):
        return b"__SHARDINGKEY\x01" + key + b"\x02"
    # An empty key is a valid key, but RocketMQ drops properties with empty values.
    return b"__KEY_B64\x01" + (base64.b64encode(key) or b"=") + b"\x02"


def key_of(properties: dict[str, str]) -> bytes | None:
    """The key in decoded properties, or None when there is none."""
    text = properties.get(TEXT_KEY)
    if text is not None:
        return text.encode()
    coded = properties.get(BASE64_KEY)
    if coded is None:
        return None
    return base64.b64decode(coded.removeprefix("="))


def key_properties(keys: pa.Array) -> pa.Array:
    """The encoded key property of each row of a binary column; null if the key is null."""
    text = _text_rows(keys)
    valid = keys.is_valid().to_numpy(zero_copy_only=False)
    as_text = _joined("__SHARDINGKEY\x01", null_where(pa.array(~text), keys))
    binary = valid & ~text
    if not binary.any():
        return as_text
    coded = _base64(keys.filter(pa.array(binary)))
    coded_of_row = np.full(len(keys), -1, dtype=np.int64)
    coded_of_row[binary] = np.arange(len(coded))
    spread = coded.take(pa.array(coded_of_row, mask=coded_of_row < 0))
    return pc.coalesce(as_text, _joined("__KEY_B64\x01", spread))


def keys_of(properties: PropertyColumns) -> pa.Array:
    """The key of each row, as a binary column."""
    text = properties.value(TEXT_KEY)
    coded = properties.value(BASE64_KEY)
    if coded.null_count == len(coded):
        return text
    # Binary keys are rare: decode them one by one.
    decoded = [
        None if value is None else base64.b64decode(value.removeprefix(b"="))
        for value in coded.to_pylist()
    ]
    return pc.coalesce(text, pa.array(decoded, pa.binary()))


def _joined(name: str, values: pa.Array) -> pa.Array:
    return pc.binary_join_element_wise(
        pa.scalar(name.encode(), pa.binary()), values, pa.scalar(b"\x02"), b""
    )


def _text_rows(keys: pa.Array) -> npt.NDArray[np.bool_]:
    """A mask of the rows that have a text key. Only keys with bytes over 127 are checked one by one."""
    offsets = value_offsets(keys).astype(np.int64)
    flat = value_bytes(keys)[offsets[0] : offsets[-1]]
    starts = offsets - offsets[0]
    text: npt.NDArray[np.bool_] = np.diff(starts) > 0
    text &= keys.is_valid().to_numpy(zero_copy_only=False)
    separators = np.concatenate(([0], np.cumsum((flat == 1) | (flat == 2))))
    text &= separators[starts[1:]] == separators[starts[:-1]]
    high = np.concatenate(([0], np.cumsum(flat > 127)))
    doubtful = np.flatnonzero(text & (high[starts[1:]] > high[starts[:-1]]))
    for row in doubtful.tolist():
        text[row] = is_text_key(keys[row].as_py())
    return text


def _base64(keys: pa.Array) -> pa.Array:
    return pa.array([base64.b64encode(key) or b"=" for key in keys.to_pylist()], pa.binary())


def as_binary(column: pa.Array, name: str) -> pa.Array:
    """Convert a text or bytes column to binary. Raises: Rejected for another type or chunks over 2 GiB."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    kind = column.type
    if pa.types.is_dictionary(kind):
        column = column.dictionary_decode()
        kind = column.type
    if kind not in _BYTES_OR_TEXT and not pa.types.is_fixed_size_binary(kind):
        raise Rejected(
            f"column {name} has the type {kind}; cast it to binary or string",
            field=name,
            limit="binary, string",
        )
    return column.cast(pa.binary())
