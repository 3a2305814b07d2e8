"""The properties string of a record: name 0x01 value 0x02, repeated.

Source: MessageDecoder#messageProperties2String, #string2messageProperties.
"""

from __future__ import annotations

from collections.abc import Mapping

from raymq.store.base.errors import Rejected
from raymq.store.base.format import SECTOR_BYTES

NAME_VALUE_SEPARATOR = b"\x01"
PROPERTY_SEPARATOR = b"\x02"
#: no properties hold so many zero bytes: recovery takes a sector of zeros for one that was never written
ZERO_SECTOR = bytes(SECTOR_BYTES)
#: name of the property that holds a record's tag
TAGS = "TAGS"
#: name of a property: "false" means that the answer waits neither for the flush nor for replicas
WAIT = "WAIT"
#: name of the property with the delay level
DELAY = "DELAY"
#: names of the properties with the topic and the queue id to which a waiting or half message goes
REAL_TOPIC, REAL_QUEUE = "REAL_TOPIC", "REAL_QID"
#: name of the property with the producer group that prepared a half message
PRODUCER_GROUP = "PGROUP"
#: name of the property with the number of messages in an inner batch
INNER_NUM = "INNER_NUM"
#: the first bytes of TAGS in a properties string, and the bytes around its value
TAG_NAME = TAGS.encode() + NAME_VALUE_SEPARATOR
TAG_EXTRA_BYTES = len(TAG_NAME) + 1


def encode(properties: Mapping[str, str]) -> bytes:
    """The properties string, with the trailing separator.

    Raises: Rejected for an empty name or value (RocketMQ drops such a pair when reading), for a separator in one, and
    for text that UTF-8 cannot hold.
    """
    for name, value in properties.items():
        if not name or not value:
            raise Rejected(
                f"property {name!r} has an empty {'value' if name else 'name'}; readers drop it, "
                "leave it out",
                field="properties",
                limit="non-empty",
            )
        if not separators_absent(name) or not separators_absent(value):
            raise Rejected(
                f"property {name!r} has the character \\x01 or \\x02, which separate properties; "
                "encode it first",
                field="properties",
                limit="no \\x01, \\x02",
            )

    text = "".join(f"{name}\x01{value}\x02" for name, value in properties.items())
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        name = text[: error.start + 1].rpartition("\x02")[2].partition("\x01")[0]
        raise Rejected(
            f"property {name!r} has half of a surrogate pair, which UTF-8 cannot hold; replace that character",
            field="properties",
            limit="Unicode text",
        ) from None


def decode(data: bytes) -> dict[str, str]:
    """Names and values of a properties string.

    The last separator may be missing. An incomplete pair is dropped, and the last duplicate wins.
    """
    found: dict[str, str] = {}
    # Bytes that are not UTF-8 are replaced. They never take a separator with them.
    for pair in str(data, "utf-8", "replace").split("\x02"):
        name, _, value = pair.partition("\x01")
        if name and value:
            found[name] = value
    return found


def separators_absent(text: str) -> bool:
    """Whether a name, value, topic or tag can be part of a properties string."""
    return "\x01" not in text and "\x02" not in text
