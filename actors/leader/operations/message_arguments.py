"""Arguments of operations that put one message, and how they are checked."""

from __future__ import annotations

import binascii
from base64 import b64decode

from raymq.actors.api import call_arguments
from raymq.actors.api.call_arguments import check_integer, wrong_value
from raymq.store.base import format as fmt
from raymq.store.records.properties import TAGS, encode, separators_absent
from raymq.store.records.record_check import check_put
from raymq.store.records.small_batch import SmallBatch

from .scope import LeaderScope


def check_as_put(leader: LeaderScope, topic: str, body: bytes, properties: dict[str, str]) -> None:
    """Refuse what a put of the message would be refused for. Raises: Rejected."""
    named = {name: value for name, value in properties.items() if name != TAGS}
    row = SmallBatch([body], [properties.get(TAGS)], [encode(named)], [0])
    check_put(topic, row, max_message_bytes=leader.store.config.max_message_bytes)


def check_body(field: str, value: object) -> bytes:
    """The bytes of a body, in base64. Raises: Rejected."""
    if type(value) is str:
        try:
            return b64decode(value, validate=True)
        except (binascii.Error, ValueError):
            pass
    raise wrong_value(field, value, "give the bytes in base64", "base64")


def check_properties(field: str, value: object) -> dict[str, str]:
    """Names and values, without the separators of a properties string. Raises: Rejected."""
    found = None if value is None else call_arguments.check_attributes(value, field)
    if found is None:
        raise wrong_value(field, value, "give names and values, both text", "{name: value}")
    for name, text in found.items():
        if not name or not separators_absent(name + text):
            advice = "give names, and values, without the characters \\x01 and \\x02"
            raise wrong_value(field, {name: text}, advice, "no \\x01, \\x02")
    return found


def check_sys_flag(field: str, value: object) -> int:
    """The bits that a sender sets. Raises: Rejected."""
    found = check_integer(field, value, 0, fmt.SYS_OF_SENDER)
    if found & ~fmt.SYS_OF_SENDER:
        advice = f"a sender sets bits of {fmt.SYS_OF_SENDER:#x} alone"
        raise wrong_value(field, value, advice, fmt.SYS_OF_SENDER)
    return found


def check_host(field: str, value: object) -> tuple[str, int]:
    """An address and a port, as 1.2.3.4:5. Raises: Rejected."""
    if type(value) is str:
        try:
            fmt.parse_host(value)
        except ValueError:
            pass
        else:
            return fmt.host_of(value)
    raise wrong_value(field, value, "give an IP address and a port", "1.2.3.4:5")
