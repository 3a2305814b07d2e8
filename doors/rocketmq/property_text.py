"""The properties string of a message as clients send it, and as a put takes it.

A put has the tag in a column of its own, and RocketMQ stores no WAIT: it is a wish of the sender for the answer.

Source: MessageDecoder#string2messageProperties, MessageExtBrokerInner#deleteProperty.
"""

from __future__ import annotations

from typing import NamedTuple

from raymq.store.records.producer_stamp import PREFIX as STAMP_PREFIX
from raymq.store.records.properties import (
    NAME_VALUE_SEPARATOR,
    PROPERTY_SEPARATOR,
    TAG_NAME,
    WAIT,
)

from .malformed import Malformed

_WAIT_NAME = WAIT.encode() + NAME_VALUE_SEPARATOR
_WAITS = _WAIT_NAME + b"true" + PROPERTY_SEPARATOR
#: java.lang.Boolean reads any other text as false
_TRUE = b"true"


class PutProperties(NamedTuple):
    """What a put takes of a message's properties."""

    #: TAGS; None: without one
    tag: str | None
    #: WAIT: whether the answer waits for the flush and the replicas, as it does by default
    wait_store_ok: bool
    #: all other properties, as the sender wrote them; None: without any
    properties: bytes | None


def split(text: str | bytes | memoryview) -> PutProperties:
    """The parts of a properties string. The last separator may be missing, and the last TAGS and WAIT win.

    A producer stamp is left out: a client that sends a message again which it has received sends its stamp too, and
    that names another row.
    Raises: Malformed for text that UTF-8 cannot hold.
    """
    data = _bytes(text)
    if not data:
        return PutProperties(None, True, None)
    if data[-1:] != PROPERTY_SEPARATOR:
        data += PROPERTY_SEPARATOR

    # What nearly every message has: WAIT=true, and one tag or none.
    rest = _without(data, _WAITS)
    tag = b""
    at = rest.find(TAG_NAME)
    if at >= 0:
        tag = rest[at + len(TAG_NAME) :].partition(PROPERTY_SEPARATOR)[0]
        rest = _without(rest, TAG_NAME + tag + PROPERTY_SEPARATOR) if tag else rest
    if TAG_NAME in rest or _WAIT_NAME in rest or STAMP_PREFIX in rest:
        return _split(data)
    return PutProperties(str(tag, "utf-8", "replace") or None, True, rest or None)


def _without(data: bytes, pair: bytes) -> bytes:
    """The properties without one. It is left if the first place where its text is found is no property."""
    before, found, after = data.partition(pair)
    if found and (not before or before.endswith(PROPERTY_SEPARATOR)):
        return before + after
    return data


def _split(data: bytes) -> PutProperties:
    tag, wait = b"", b""
    rest: list[bytes] = []
    for pair in data.split(PROPERTY_SEPARATOR):
        # Readers drop a property with an empty value.
        if pair.startswith(TAG_NAME):
            tag = pair[len(TAG_NAME) :] or tag
        elif pair.startswith(_WAIT_NAME):
            wait = pair[len(_WAIT_NAME) :] or wait
        elif not pair.startswith(STAMP_PREFIX):
            rest.append(pair)

    # The last one is what follows the last separator: nothing.
    properties = PROPERTY_SEPARATOR.join(rest)
    return PutProperties(
        str(tag, "utf-8", "replace") or None, not wait or wait.lower() == _TRUE, properties or None
    )


def _bytes(text: str | bytes | memoryview) -> bytes:
    if not isinstance(text, str):
        return bytes(text)
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise Malformed("properties are text that UTF-8 can hold") from None


def join(parts: PutProperties) -> bytes:
    """The properties string of these parts. WAIT is in it if it is false."""
    data = parts.properties or b""
    if parts.tag:
        data += TAG_NAME + parts.tag.encode() + PROPERTY_SEPARATOR
    if not parts.wait_store_ok:
        data += _WAIT_NAME + b"false" + PROPERTY_SEPARATOR
    return data
