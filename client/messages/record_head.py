"""What a RocketMQ sender may set beside body and properties: flag, sysFlag, born host, delay level and WAIT."""

from __future__ import annotations

from numbers import Integral
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from raymq.store.base import format as fmt
from raymq.store.base.errors import Rejected
from raymq.store.config.delay_levels import DEFAULT_LEVEL_COUNT
from raymq.store.records.properties import DELAY, WAIT, encode
from raymq.store.records.record import MORE_SCHEMA

from .fields import BY_NAME

#: flag, sysFlag and host field of a message, as columns of MORE_SCHEMA have them
Head: TypeAlias = tuple[int, int, bytes | None]
NO_HEAD: Head = (0, 0, None)

#: the property of a message whose receipt waits neither for the flush nor for replicas
WAITS_NOT = encode({WAIT: "false"})

#: column of `send_batch` -> that of MORE_SCHEMA
_COLUMNS = {BY_NAME[field.name].column_name: field for field in MORE_SCHEMA}
_INT32_MAX = 2**31 - 1


def head_of(flag: int, sys_flag: int, born_host: str | None) -> Head | None:
    """The head of a message; None: all three are defaults. Raises: Rejected."""
    if type(flag) is not int or not -_INT32_MAX - 1 <= flag <= _INT32_MAX:
        flag = _int_of("flag", flag, -_INT32_MAX - 1, _INT32_MAX)
    if type(sys_flag) is not int or sys_flag & ~fmt.SYS_OF_SENDER:
        sys_flag = _int_of("sys_flag", sys_flag, 0, _INT32_MAX)
        if sys_flag & ~fmt.SYS_OF_SENDER:
            raise Rejected(
                f"sys_flag is {sys_flag:#x}; a sender sets bits of {fmt.SYS_OF_SENDER:#x} alone (compressed and how, "
                "several tags), and the shard sets those of hosts and transactions",
                field="sys_flag",
                limit=fmt.SYS_OF_SENDER,
                found=sys_flag,
            )
    head = (flag, sys_flag, None if born_host is None else host_bytes(born_host))
    return None if head == NO_HEAD else head


def host_bytes(text: object, **row: int) -> bytes:
    """The host field of a born host. Args: `row`: for the error. Raises: Rejected."""
    try:
        return fmt.parse_host(text)
    except (TypeError, ValueError):
        raise Rejected(
            f"born_host is {text!r}; give an IP address and a port, such as 192.0.2.1:5000 or [2001:db8::1]:5000",
            field="born_host",
            limit="ADDRESS:PORT",
            found=text,
            **row,
        ) from None


def delay_level_of(level: object, levels: int = DEFAULT_LEVEL_COUNT) -> int:
    """The delay level of a message; those above the highest one are the highest, as in RocketMQ.

    Args: `levels`: how many the cluster has. Raises: Rejected.
    """
    return min(_int_of("delay_level", level, 0, _INT32_MAX), levels)


def delay_property(level: int) -> bytes:
    """The encoded property of a delay level."""
    return encode({DELAY: str(level)})


def more_arrays(data: pa.RecordBatch | pa.Table, names: list[str]) -> dict[str, pa.Array]:
    """The columns of MORE_SCHEMA of a `send_batch`. Args: `names`: of all its columns. Raises: Rejected."""
    found: dict[str, pa.Array] = {}
    for name, field in _COLUMNS.items():
        if name not in names:
            continue

        column = data.column(name)
        if isinstance(column, pa.ChunkedArray):
            column = column.combine_chunks()
        if field.name == "born_host" and not _are_host_fields(column.type):
            column = _hosts(column)
        try:
            found[field.name] = column.cast(field.type)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise Rejected(
                f"column {name} has the type {column.type}, or a value that {field.type} cannot hold: {error}",
                field=name,
                limit=str(field.type),
                found=str(column.type),
            ) from error
    return found


def _are_host_fields(kind: pa.DataType) -> bool:
    """Whether a column has host fields as the log does, or no value at all."""
    is_binary = pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
    return bool(is_binary or pa.types.is_fixed_size_binary(kind) or pa.types.is_null(kind))


def _hosts(column: pa.Array) -> pa.Array:
    """Born hosts as host fields. Each different one is read once."""
    coded = column.dictionary_encode()
    packed: list[bytes] = []
    for code, text in enumerate(coded.dictionary.to_pylist()):
        try:
            packed.append(host_bytes(text))
        except Rejected:
            codes = coded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
            row = int(np.argmax(codes == code))
            host_bytes(text, row=row)
    return pa.array(packed, pa.binary()).take(coded.indices)


def _int_of(name: str, value: Any, low: int, high: int) -> int:
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_whole or not low <= int(value) <= high:
        raise Rejected(
            f"{name} is {value!r}; give a whole number from {low} to {high}",
            field=name,
            limit=f"{low}..{high}",
            found=value,
        )
    return int(value)
