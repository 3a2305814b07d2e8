"""The check of a whole batch before any of its rows is stored, so that a refusal stores nothing."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raymq.store.base import format as fmt
from raymq.store.base.arrays import Int64s
from raymq.store.base.errors import PropertiesTooLong, Rejected

from .binary_columns import (
    joined_length,
    joined_values,
    value_lengths,
)
from .producer_stamp import PREFIX as STAMP_PREFIX
from .producer_stamp import STAMP_BYTES
from .properties import (
    NAME_VALUE_SEPARATOR,
    PROPERTY_SEPARATOR,
    TAG_EXTRA_BYTES,
    TAG_NAME,
    TAGS,
    WAIT,
    ZERO_SECTOR,
    encode,
    separators_absent,
)
from .small_batch import (
    MORE_SCHEMA,
    PUT_SCHEMA,
    SMALL_BYTES_MAX,
    SmallBatch,
    all_rows_valid,
    more_columns,
    put_schema,
    small_batch,
)

_WAITS_NOT = encode({WAIT: "false"})

#: bytes that tag and properties of a row may have, beside what the store adds to them
_STORED_BYTES_MAX = fmt.PROPERTIES_MAX_BYTES - STAMP_BYTES - TAG_EXTRA_BYTES

#: bytes that a row of a SmallBatch counts for besides its body and properties
ROW_BYTES = 64


def check_put(
    topic: str, batch: pa.RecordBatch | SmallBatch, *, max_message_bytes: int
) -> SmallBatch | None:
    """Refuse a batch that cannot be stored as a whole.

    Returns: the rows of a small batch, which `encode_batch` writes as such.
    Raises: Rejected, with field, limit and row, for one of these:

    - a bad topic, wrong columns, or damaged Arrow data
    - a body that is null or too large, or a null born_time_ms
    - a tag with separators
    - properties that are malformed or hold properties of the store itself
    - tag or properties with 512 zero bytes in a row
    - a sys_flag with a bit that no sender sets, or a born_host that is not a host field
    - properties that would be longer than 32,767 bytes together with the tag
    """
    fmt.check_topic_name(topic)
    if isinstance(batch, SmallBatch):
        if all_rows_valid(batch, max_message_bytes):
            return batch
        batch = batch.to_batch()

    check_columns(batch)
    if not batch.num_rows:
        return None
    small = small_batch(batch)
    if small is not None and all_rows_valid(small, max_message_bytes):
        return small

    body, tag, properties, born = batch.columns[:4]
    for name, column in (("body", body), ("born_time_ms", born)):
        if column.null_count:
            row = pc.index(column.is_null(), True).as_py()
            fault = f"row {row} has no {name}; it may not be null"
            raise Rejected(fault, field=name, limit="not null", row=row)

    # No value is longer than all of them together: most batches need no check of each row.
    if joined_length(body) > max_message_bytes:
        advice = (
            "split it, compress it, store it elsewhere and send its place, or raise max_message_bytes of the store "
            "(of a cluster: raymq config set, up to 32 MiB)"
        )
        _check_lengths(value_lengths(body), max_message_bytes, "body", advice)

    stored_bytes = 0
    if tag.null_count < len(tag):
        stored_bytes += _check_tags(tag)
    if properties.null_count < len(properties):
        stored_bytes += _check_properties(properties)
    if stored_bytes > _STORED_BYTES_MAX:
        _check_stored(tag, properties)
    _check_more(more_columns(batch))
    return small


def batch_bytes(batch: pa.RecordBatch | SmallBatch, *, is_checked: bool = False) -> int:
    """The bytes that a batch counts for in limits: about its own, or those of its buffers if these are small.

    Args: `is_checked`: the batch has passed `check_put`.
    """
    if isinstance(batch, SmallBatch):
        stored = sum(map(len, filter(None, batch.properties)))
        return sum(map(len, batch.bodies)) + stored + ROW_BYTES * batch.num_rows
    held: int = batch.get_total_buffer_size()
    if held <= SMALL_BYTES_MAX:
        return held
    if is_checked:
        # If nearly all bytes of the buffers are these bodies, no other rows share them. `nbytes` costs 20 us more.
        is_alone = held - joined_length(batch.column(0)) <= held // 8
        return held if is_alone else int(batch.nbytes)
    try:
        # `nbytes` reads the last offset; of a batch from the network that may be anywhere.
        batch.validate()
    except pa.ArrowInvalid:
        # `check_put` refuses it.
        return held
    size: int = batch.nbytes
    return size


def wait_store_ok(batch: pa.RecordBatch | SmallBatch) -> bool:
    """Whether the answer waits for the flush and the replicas: not when every row says WAIT=false.

    Source: MessageBatch#generateFromList, which wants the same of all rows.
    """
    if isinstance(batch, SmallBatch):
        return not all(each and _waits_not(each) for each in batch.properties)
    properties = batch.column(2)
    if properties.null_count:
        return True
    # In most batches the first row decides.
    return not (_waits_not(properties[0].as_py()) and all(map(_waits_not, properties.to_pylist())))


def _waits_not(properties: bytes) -> bool:
    at = properties.find(_WAITS_NOT)
    return at == 0 or (at > 0 and PROPERTY_SEPARATOR + _WAITS_NOT in properties)


def check_columns(batch: pa.RecordBatch) -> None:
    """Refuse a batch that does not have PUT_SCHEMA or is not valid Arrow data. Raises: Rejected."""
    if not batch.schema.equals(PUT_SCHEMA):
        _check_schema(batch)
    try:
        # Offsets that came over a network are trusted by every kernel below.
        batch.validate(full=True)
    except pa.ArrowInvalid as error:
        raise Rejected(
            f"the batch is not valid Arrow data: {error}", field="batch", limit="valid Arrow data"
        ) from error


def _check_schema(batch: pa.RecordBatch) -> None:
    schema = put_schema(batch.schema.names)
    if batch.schema.names != schema.names:
        raise Rejected(
            f"the batch has the columns {batch.schema.names}; expected {PUT_SCHEMA.names}, and after them those of "
            f"{MORE_SCHEMA.names} that it has",
            field="columns",
            limit=", ".join(PUT_SCHEMA.names),
        )
    for expected, found in zip(schema, batch.schema, strict=True):
        if found.type != expected.type:
            raise Rejected(
                f"column {expected.name} has the type {found.type}; cast it to {expected.type}",
                field=expected.name,
                limit=str(expected.type),
            )


def _check_more(more: dict[str, pa.Array]) -> None:
    """Refuse values of MORE_SCHEMA that no record of a sender has. Raises: Rejected."""
    if "sys_flag" in more:
        found = more["sys_flag"].fill_null(0).to_numpy()
        wrong = found & ~fmt.SYS_OF_SENDER != 0
        if wrong.any():
            row = int(wrong.argmax())
            raise Rejected(
                f"row {row} has the sys_flag {int(found[row]):#x}; a sender sets bits of {fmt.SYS_OF_SENDER:#x} alone "
                "(compressed and how, several tags), and the shard sets those of hosts and transactions",
                field="sys_flag",
                limit=fmt.SYS_OF_SENDER,
                found=int(found[row]),
                row=row,
            )

    if "born_host" in more:
        hosts = more["born_host"]
        wrong = hosts.is_valid().to_numpy(zero_copy_only=False) & ~np.isin(
            value_lengths(hosts), fmt.HOST_BYTES
        )
        if wrong.any():
            row = int(wrong.argmax())
            raise Rejected(
                f"row {row} has a born_host of {len(hosts[row].as_py())} bytes; give 4 or 16 bytes of an IP address "
                "and 4 of the port",
                field="born_host",
                limit="8 or 20 bytes",
                found=len(hosts[row].as_py()),
                row=row,
            )


def _check_lengths(
    lengths: Int64s, limit: int, field: str, advice: str, kind: type[Rejected] = Rejected
) -> None:
    row = int(lengths.argmax())
    if lengths[row] > limit:
        raise kind(
            f"row {row} has {int(lengths[row])} bytes of {field}, the limit is {limit}: {advice}",
            field=field,
            limit=limit,
            row=row,
        )


def _check_tags(tag: pa.StringArray) -> int:
    """Refuse tags with separators. Returns: bytes of all tags; those of null slots may be among them."""
    data = joined_values(tag)
    if NAME_VALUE_SEPARATOR in data or PROPERTY_SEPARATOR in data:
        # A null slot may span bytes too: only now look row by row.
        for row, text in enumerate(tag.to_pylist()):
            if text and not separators_absent(text):
                fault = f"the tag of row {row} has \\x01 or \\x02, which separate properties"
                raise Rejected(fault, field="tag", limit="no \\x01, \\x02", row=row)
    if ZERO_SECTOR in data:
        _refuse_zeros(tag.cast(pa.binary()), "tag")
    return len(data)


def _refuse_zeros(column: pa.BinaryArray, field: str) -> None:
    """Refuse the first row with a sector of zeros, which recovery would take for one that was never written."""
    for row, value in enumerate(column.to_pylist()):
        if value and ZERO_SECTOR in value:
            count = len(ZERO_SECTOR)
            raise Rejected(
                f"row {row} has {count} zero bytes one after the other in its {field}; put them into the body",
                field=field,
                limit=f"less than {count} zero bytes in a row",
                row=row,
            )


def _check_stored(tag: pa.StringArray, properties: pa.BinaryArray) -> None:
    """Refuse properties that are too long with what the store adds to them.

    No value is longer than all of them together: most batches need no call.
    """
    tags, lengths = value_lengths(tag), value_lengths(properties)
    if int(tags.max()) + int(lengths.max()) <= _STORED_BYTES_MAX:
        return
    stored = STAMP_BYTES + lengths + np.where(tags > 0, tags + TAG_EXTRA_BYTES, 0)
    advice = "with producer stamp and tag, which the store adds; put large values into the body"
    _check_lengths(stored, fmt.PROPERTIES_MAX_BYTES, "properties", advice, PropertiesTooLong)


def _check_properties(properties: pa.BinaryArray) -> int:
    """Refuse properties that are malformed or the store's. Returns: their bytes, with those of null slots."""
    data = joined_values(properties)
    if not data:
        return 0
    ended = pc.ends_with(properties, pattern=PROPERTY_SEPARATOR)
    # Null and empty properties do not end with it either.
    if (ended.true_count or 0) < len(properties) and (
        unended := (value_lengths(properties) > 0)
        & ~ended.fill_null(False).to_numpy(zero_copy_only=False)
    ).any():
        row = int(unended.argmax())
        raise Rejected(
            f"the properties of row {row} do not end with \\x02; encode them with "
            "raymq.store.records.properties.encode",
            field="properties",
            limit="name \\x01 value \\x02 ...",
            row=row,
        )

    if TAG_NAME in data or STAMP_PREFIX in data:
        # The name may be part of another name or in a null slot: only now look row by row.
        for row, value in enumerate(properties.to_pylist()):
            for reserved in (TAG_NAME, STAMP_PREFIX):
                if value and (value.startswith(reserved) or PROPERTY_SEPARATOR + reserved in value):
                    name = reserved[:-1].decode()
                    raise Rejected(
                        f"the properties of row {row} have {name}, which the store writes; "
                        + ("use the tag column" if name == TAGS else "leave it out"),
                        field="properties",
                        limit=f"not {name}",
                        row=row,
                    )
    if ZERO_SECTOR in data:
        _refuse_zeros(properties, "properties")
    return len(data)
