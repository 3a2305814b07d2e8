"""The options of a write with `format("raymq")`: one table of them all, and the check of every value.

Pure: no Spark, no network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

from raymq.client.arguments import check_choice
from raymq.store.base.errors import Rejected

from .source_options import connection_options, flag, known_options

Delivery = Literal["direct", "staged"]
DELIVERIES = ("direct", "staged")


class SinkOption(NamedTuple):
    """One option, as the documentation shows it."""

    name: str
    type: str
    default: str
    meaning: str


#: every option of a write
OPTIONS = (
    SinkOption(*("raymq.address", "URL", "required"), "as of a read"),
    SinkOption(*("raymq.token", "text", "RAYMQ_TOKEN of the driver"), "as of a read"),
    SinkOption(*("raymq.ca", "path", "RAY_TLS_CA_CERT of the driver"), "as of a read"),
    SinkOption(
        *("topic", "text", "the column `topic`"),
        "the topic of all rows; it wins over the column `topic`",
    ),
    SinkOption(
        *("writeId", "text", "a new one (batch), query id and batch id (stream)"),
        "the name of the write: the same rows under the same name are stored once; batches only",
    ),
    SinkOption(
        *("delivery", "staged or direct", "staged"),
        "`direct`: rows go to their queues at once, and are written once; for plans that give the same rows each time",
    ),
    SinkOption(
        *("verify", "true or false", "true"),
        "direct only: rows that an earlier attempt has stored are compared with the current ones; `false` assumes "
        "that they are the same",
    ),
)


@dataclass(frozen=True, kw_only=True)
class SinkOptions:
    """The checked options of one write."""

    addresses: tuple[str, ...]
    token: str | None
    ca: str | None
    #: None: each row names its topic
    topic: str | None
    #: None: a new one
    write_id: str | None
    delivery: Delivery
    #: of a direct write
    verify: bool

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SinkOptions:
        """Check the options that Spark hands over, whose names may be lower-cased.

        Raises: Rejected naming the option.
        """
        given = known_options(options, [option.name for option in OPTIONS])
        addresses, token, ca = connection_options(given)
        delivery = _delivery(given)
        return cls(
            addresses=addresses,
            token=token,
            ca=ca,
            topic=_text(given, "topic"),
            write_id=_text(given, "writeId"),
            delivery=delivery,
            verify=flag(given, "verify", default=True),
        )


def _text(given: Mapping[str, str], name: str) -> str | None:
    if name not in given:
        return None
    if not given[name]:
        raise Rejected(f"option {name} is empty; leave it out, or set it", field=name, limit="text")
    return given[name]


def _delivery(given: Mapping[str, str]) -> Delivery:
    text = given.get("delivery", "staged").lower()
    check_choice("delivery", text, DELIVERIES)
    if text == "direct" and "topic" not in given:
        message = "delivery=direct needs the option topic; rows that name their topics are written with delivery=staged"
        raise Rejected(message, field="topic", limit="a topic, or delivery=staged")
    if text != "direct" and "verify" in given:
        message = "option verify is for delivery=direct: a staged write stores no row of an attempt that does not count"
        raise Rejected(message, field="verify", limit="absent, or delivery=direct")
    return cast(Delivery, text)
