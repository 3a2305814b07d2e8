"""Message keys as columns: from and to the properties string."""

from __future__ import annotations

import base64

import pyarrow as pa
import pyarrow.compute as pc

#: a key that is text, and one that is not (see cluster/message.py)
TEXT, BASE64 = "__SHARDINGKEY", "__KEY_B64"


def key_column(properties: pa.Array) -> pa.Array:
    """The key of each row's properties string, null where there is none; binary."""
    text = _value(properties, TEXT)
    if text.null_count == 0:
        return text
    coded = _value(properties, BASE64)
    if coded.null_count == len(coded):
        return text
    # Keys that are no text are rare: row by row.
    other = [None if c is None else base64.b64decode(c.removeprefix(b"=")) for c in coded.to_pylist()]
    return pc.coalesce(text, pa.array(other, pa.binary()))


def _value(properties: pa.Array, name: str) -> pa.Array:
    found = pc.extract_regex(properties, rf"(?:^|\x02){name}\x01(?P<v>[^\x02]*)")
    return pc.cast(pc.struct_field(found, 0), pa.binary())


def properties_column(keys: pa.Array) -> pa.Array:
    """The properties string that carries each key, null where there is none."""
    if keys.null_count == len(keys):
        return pa.nulls(len(keys), pa.binary())
    empty = pa.scalar(b"", pa.binary())
    try:
        text = pc.cast(keys, pa.string())
        plain = not pc.any(pc.match_substring_regex(text, "^$|[\x01\x02]")).as_py()
    except pa.ArrowInvalid:
        plain = False
    if plain:
        name, end = pa.scalar(TEXT.encode() + b"\x01", pa.binary()), pa.scalar(b"\x02", pa.binary())
        return pc.binary_join_element_wise(name, keys, end, empty)
    from raymq.cluster.message import encode_properties

    return pa.array(
        [None if key is None else encode_properties(key) for key in keys.to_pylist()], pa.binary()
    )
