"""The options of a write with `format("raymq")`: one table of them all, and the check of every value.

Pure: no Spark, no network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from raymq.store.base.errors import Rejected

from .source_options import connection_options, known_options


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

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SinkOptions:
        """Check the options that Spark hands over, whose names may be lower-cased.

        Raises: Rejected naming the option.
        """
        given = known_options(options, [option.name for option in OPTIONS])
        addresses, token, ca = connection_options(given)
        return cls(
            addresses=addresses,
            token=token,
            ca=ca,
            topic=_text(given, "topic"),
            write_id=_text(given, "writeId"),
        )


def _text(given: Mapping[str, str], name: str) -> str | None:
    if name not in given:
        return None
    if not given[name]:
        raise Rejected(f"option {name} is empty; leave it out, or set it", field=name, limit="text")
    return given[name]
