"""The options of `format("raymq")`: one table of them all, and the check of every value.

Pure: no Spark, no network. Names and values are those of Spark's Kafka connector. RayMQ's own begin with `raymq.`,
except `readFrom`.
"""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, cast

from raymq.actors.protocol.tls import parse_url
from raymq.client.arguments import OFFSET_MAX, check_choice, clean_token
from raymq.client.consume.consumer_config import READ_FROM, ReadFrom
from raymq.client.consume.selector import selector_of
from raymq.store.base.errors import Rejected
from raymq.store.records.requests import MessageSelector

from .offsets import (
    EARLIEST,
    LATEST,
    OFFSETS_EXAMPLE,
    TIMES_EXAMPLE,
    Position,
    TopicQueue,
    parse_assignment,
    parse_offsets,
)

_Function = TypeVar("_Function", bound=Callable[..., Any])

#: environment variable with the token, as for `raymq.connect`
TOKEN_VARIABLE = "RAYMQ_TOKEN"


class SourceOption(NamedTuple):
    """One option, as the documentation shows it."""

    name: str
    type: str
    default: str
    used_by: Literal["batch", "stream", "both"]
    meaning: str


#: every option of a read
OPTIONS = (
    SourceOption(
        *("raymq.address", "URL", "required", "both"),
        "`raymq://host:port` or, with TLS, `raymq+tls://host:port` of any shard; several addresses, separated by "
        "commas, are tried in order, again and again for up to 30 s. `raymq.spark.options` gives the addresses of all "
        "replicas",
    ),
    SourceOption(
        *("raymq.token", "text", "RAYMQ_TOKEN of the driver", "both"),
        "the content of the file `token` in the data directory",
    ),
    SourceOption(
        *("raymq.ca", "path", "RAY_TLS_CA_CERT of the driver", "both"),
        "a PEM file on the driver with the authority that signed the shards' certificates",
    ),
    SourceOption(
        *("subscribe", "text", "none", "both"),
        "topics, separated by commas; exactly one of `subscribe`, `subscribePattern` and `assign` is needed",
    ),
    SourceOption(
        *("subscribePattern", "regular expression", "none", "both"),
        "topics whose whole name matches; a stream also reads matching topics that are created later",
    ),
    SourceOption(
        *("assign", "JSON", "none", "both"), 'queues of topics, such as `{"orders": [0, 1]}`'
    ),
    SourceOption(
        *("startingOffsets", "text or JSON", "earliest (batch), latest (stream)", "both"),
        f"`earliest`, `latest` (stream only), or an offset of each queue, such as `{OFFSETS_EXAMPLE}`: -2 is earliest, "
        "-1 latest; a stream uses it only at its first start",
    ),
    SourceOption(
        *("startingOffsetsByTimestamp", "JSON", "none", "both"),
        f"a time in ms since 1970 of each queue, such as `{TIMES_EXAMPLE}`: the first message that was stored then or "
        "later; wins over `startingOffsets`",
    ),
    SourceOption(
        *("startingTimestamp", "milliseconds", "none", "both"),
        "one time for all queues; wins over `startingOffsetsByTimestamp`",
    ),
    SourceOption(
        *("startingOffsetsByTimestampStrategy", "error or latest", "error", "both"),
        "for a queue without a message at or after the starting time: fail, or begin at its end",
    ),
    SourceOption(
        *("endingOffsets", "text or JSON", "latest", "batch"),
        "`latest`, or the offset before which each queue ends; -1 is latest",
    ),
    SourceOption(
        *("endingOffsetsByTimestamp", "JSON", "none", "batch"),
        "a time of each queue: messages that were stored then or later are left out; wins over `endingOffsets`",
    ),
    SourceOption(
        *("endingTimestamp", "milliseconds", "none", "batch"),
        "one time for all queues; wins over `endingOffsetsByTimestamp`",
    ),
    SourceOption(
        *("minPartitions", "whole number", "one per queue", "both"),
        "splits large queues, into about this many tasks in all",
    ),
    SourceOption(
        *("maxOffsetsPerTrigger", "whole number", "no limit", "stream"),
        "the maximum number of messages in one batch, split over the queues in proportion to their lag; needs Spark "
        "4.2",
    ),
    SourceOption(
        *("failOnDataLoss", "true or false", "true", "both"),
        "for messages that expired before they were read: fail, or log a warning and read on",
    ),
    SourceOption(
        *("includeHeaders", "true or false", "false", "both"),
        "adds the column `headers`: the properties as Kafka's connector shows headers",
    ),
    SourceOption(
        *("tags", "text", "none", "both"),
        "only messages with this tag, or one of several tags with two vertical bars between them; the shards look at "
        "the others, and send nothing of them",
    ),
    SourceOption(
        *("sql", "text", "none", "both"),
        "only messages for whose properties this SQL92 expression is true, such as `price > 5 AND region IN ('eu')`; "
        "either `tags` or `sql`",
    ),
    SourceOption(
        *("pushDownPredicate", "true or false", "false", "batch"),
        "`true`: filters on `topic`, `partition`, `offset`, `timestamp` and `tag` choose what is read; needs "
        "`spark.sql.python.filterPushdown.enabled`",
    ),
    SourceOption(
        *("readFrom", "leader or nearest", "leader", "both"),
        "`nearest`: each task reads from a replica near it, if the cluster has several",
    ),
)

#: the options of format("raymq") alone: a function gets a cluster handle, and Spark 3.5 hands it no filters
FORMAT_ONLY = ("raymq.address", "raymq.token", "raymq.ca", "pushDownPredicate")


def takes_options(used_by: Literal["batch", "stream"]) -> Callable[[_Function], _Function]:
    """Decorate a function that takes `**options`: its signature then shows those of a batch or of a stream."""

    def decorate(function: _Function) -> _Function:
        shown = inspect.signature(function)
        own = [each for each in shown.parameters.values() if each.kind is not each.VAR_KEYWORD]
        options = [
            inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=None)
            for each in OPTIONS
            if each.used_by in (used_by, "both") and each.name not in FORMAT_ONLY
        ]
        function.__signature__ = shown.replace(parameters=own + options)  # type: ignore[attr-defined]
        return function

    return decorate


#: options that Spark itself sets or reads
_SPARK_OPTIONS = frozenset({"path", "paths", "checkpointlocation", "queryname", "pathglobfilter"})


class ConnectionOptions(Protocol):
    """How a read or a write reaches its cluster."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """URLs of shards, to try in order."""

    @property
    def token(self) -> str | None:
        """The cluster's token."""

    @property
    def ca(self) -> str | None:
        """A file with the authority that signed the shards' certificates."""


class Subscription(NamedTuple):
    """What is read: exactly one of these is not None."""

    topics: tuple[str, ...] | None = None
    pattern: str | None = None
    queues: tuple[TopicQueue, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """The checked options of one read."""

    #: URLs of shards, to try in order
    addresses: tuple[str, ...]
    token: str | None
    ca: str | None
    subscription: Subscription
    #: None: the default of a batch or a stream
    starting: Position | None
    ending: Position | None
    #: for a starting time after the last message
    without_match: Literal["error", "latest"]
    min_partitions: int
    max_offsets_per_trigger: int | None
    fail_on_data_loss: bool
    include_headers: bool
    read_from: ReadFrom
    push_down_predicate: bool
    #: only these messages; None: all
    selector: MessageSelector | None

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SourceOptions:
        """Check the options that Spark hands over, whose names may be lower-cased.

        Raises: Rejected naming the option.
        """
        given = known_options(options, [option.name for option in OPTIONS])
        addresses, token, ca = connection_options(given)
        return cls._of(given, addresses, token, ca)

    @classmethod
    def of_cluster(cls, topic: str | None, options: Mapping[str, object]) -> SourceOptions:
        """Check the options of a read whose cluster is known.

        Args: `topic`: the option `subscribe`. `options`: numbers, flags and dicts take the place of texts, too.
        Raises: Rejected naming the option.
        """
        texts = option_texts({name: each for name, each in options.items() if each is not None})
        if topic is not None:
            subscriptions = {"subscribe", "subscribepattern", "assign"}
            twice = [name for name in texts if name.lower() in subscriptions]
            if twice:
                message = (
                    f"the topic {topic!r} is given, and {twice[0]}, too; leave one of them out"
                )
                raise Rejected(message, field=twice[0], limit="absent")
            texts["subscribe"] = topic
        names = [option.name for option in OPTIONS if option.name not in FORMAT_ONLY]
        return cls._of(known_options(texts, names), (), None, None)

    @classmethod
    def _of(
        cls, given: Mapping[str, str], addresses: tuple[str, ...], token: str | None, ca: str | None
    ) -> SourceOptions:
        return cls(
            addresses=addresses,
            token=token,
            ca=ca,
            subscription=_subscription(given),
            starting=_position(given, "starting"),
            ending=_position(given, "ending"),
            without_match=_without_match(given),
            min_partitions=_whole_number(given, "minPartitions") or 1,
            max_offsets_per_trigger=_whole_number(given, "maxOffsetsPerTrigger"),
            fail_on_data_loss=flag(given, "failOnDataLoss", default=True),
            include_headers=flag(given, "includeHeaders", default=False),
            read_from=_read_from(given),
            push_down_predicate=flag(given, "pushDownPredicate", default=False),
            selector=selector_of(given.get("tags"), given.get("sql")),
        )

    def batch_positions(self) -> tuple[Position, Position]:
        """Where a batch begins and ends. Raises: Rejected for a position at which it would be empty."""
        starting = self.starting or Position("startingOffsets", "offset", EARLIEST)
        ending = self.ending or Position("endingOffsets", "offset", LATEST)
        for position, refused, words in (
            (starting, LATEST, "a batch that begins at the latest offset (-1) is empty"),
            (ending, EARLIEST, "a batch that ends at the earliest offset (-2) is empty"),
        ):
            if position.holds(refused):
                raise Rejected(
                    f"{position.option}: {words}; use {'earliest' if refused == LATEST else 'latest'} or an offset",
                    field=position.option,
                    limit="earliest or an offset" if refused == LATEST else "latest or an offset",
                    found=refused,
                )
        return starting, ending

    def stream_position(self) -> Position:
        """Where a stream begins at its first start. Raises: Rejected for a position where it would end."""
        if self.ending is not None:
            raise Rejected(
                f"{self.ending.option} is for batches: a stream has no end; use trigger(availableNow=True)",
                field=self.ending.option,
                limit="absent",
            )
        return self.starting or Position("startingOffsets", "offset", LATEST)


def option_texts(options: Mapping[str, object]) -> dict[str, str]:
    """Options of a Python call as the texts that Spark would hand over."""
    found: dict[str, str] = {}
    for name, value in options.items():
        if isinstance(value, dict | list):
            found[name] = json.dumps(value)
        elif isinstance(value, bool):
            found[name] = str(value).lower()
        else:
            found[name] = str(value)
    return found


_NO_TABLE = (
    "Spark gives the options of a saved table to no read and no write of it: use CREATE TEMPORARY VIEW ... USING raymq "
    "OPTIONS (...)"
)


def known_options(options: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """The options under their true names, without those of Spark. Raises: Rejected for one that is not in `names`."""
    if any(name.lower() == "provider" or name.lower().startswith("option.") for name in options):
        # The properties of a table that is about to be made.
        raise Rejected(f"{_NO_TABLE}.", field="table", limit="a temporary view")
    true_names = {name.lower(): name for name in names}
    given: dict[str, str] = {}
    for name, value in options.items():
        known = true_names.get(name.lower())
        if known is not None:
            given[known] = str(value).strip()
        elif name.lower() not in _SPARK_OPTIONS:
            listed = ", ".join(names)
            message = f"unknown option {name!r}; format raymq has the options {listed}"
            raise Rejected(message, field=name, limit=listed, found=name)
    return given


def connection_options(given: Mapping[str, str]) -> tuple[tuple[str, ...], str, str | None]:
    """URLs of shards, the token and the path of the authority. Raises: Rejected naming the option."""
    return _addresses(given), _token(given), given.get("raymq.ca")


def _addresses(given: Mapping[str, str]) -> tuple[str, ...]:
    text = given.get("raymq.address", "")
    urls = tuple(filter(None, (each.strip() for each in text.split(","))))
    form = "raymq://host:port or raymq+tls://host:port"
    if not urls:
        message = f"option raymq.address is missing; set it to {form} of a shard (`raymq status` shows them)"
        if not given:
            message += f". {_NO_TABLE}, or give them in the query: SELECT ... FROM t WITH (...)"
        raise Rejected(message, field="raymq.address", limit=form, found=text)

    for url in urls:
        try:
            is_url = parse_url(url) is not None
        except Rejected:
            is_url = False
        if not is_url:
            message = f"raymq.address has {url!r}; use {form}"
            raise Rejected(message, field="raymq.address", limit=form, found=url)
    return urls


def _token(given: Mapping[str, str]) -> str:
    token = clean_token("raymq.token", given.get("raymq.token") or os.environ.get(TOKEN_VARIABLE))
    if not token:
        raise Rejected(
            f"option raymq.token is missing; set it, or {TOKEN_VARIABLE} on the driver, to the content of the file "
            "`token` in the data directory",
            field="raymq.token",
            limit="the cluster's token",
        )
    return token


def _subscription(given: Mapping[str, str]) -> Subscription:
    names = ("subscribe", "subscribePattern", "assign")
    chosen = [name for name in names if name in given]
    if len(chosen) != 1:
        what = f"{' and '.join(chosen)} are given" if chosen else "none is given"
        message = f"exactly one of subscribe, subscribePattern and assign says what is read; {what}"
        raise Rejected(
            message, field="subscribe", limit="exactly one", found=", ".join(chosen) or None
        )

    (name,) = chosen
    text = given[name]
    if name == "assign":
        return Subscription(queues=parse_assignment(name, text))
    if name == "subscribePattern":
        try:
            re.compile(text)
        except re.error as error:
            message = f"subscribePattern is {text!r}, which is not a regular expression: {error}"
            raise Rejected(message, field=name, limit="a regular expression", found=text) from None
        return Subscription(pattern=text)

    topics = [each.strip() for each in text.split(",")]
    if not all(topics):
        message = f"subscribe is {text!r}; give names of topics, separated by commas"
        raise Rejected(message, field=name, limit="topic,topic", found=text)
    return Subscription(topics=tuple(dict.fromkeys(topics)))


def _position(given: Mapping[str, str], side: Literal["starting", "ending"]) -> Position | None:
    """Where the read begins or ends. A time for all queues wins over one of each, and that over offsets."""
    found: list[Position] = []
    # All are checked, also those that another one wins over.
    for name in (f"{side}Timestamp", f"{side}OffsetsByTimestamp", f"{side}Offsets"):
        if name not in given:
            continue
        text = given[name]
        if name.endswith("OffsetsByTimestamp"):
            times = parse_offsets(name, text, minimum=0, example=TIMES_EXAMPLE)
            found.append(Position(name, "time", times))
        elif name.endswith("Timestamp"):
            found.append(Position(name, "time", _milliseconds(name, text)))
        else:
            found.append(Position(name, "offset", _offsets(name, text)))
    return found[0] if found else None


def _milliseconds(name: str, text: str) -> int:
    if not text.isdecimal() or int(text) > OFFSET_MAX:
        message = f"{name} is {text!r}; give milliseconds since 1970"
        raise Rejected(message, field=name, limit="milliseconds since 1970", found=text)
    return int(text)


def _offsets(name: str, text: str) -> int | dict[TopicQueue, int]:
    word = {"earliest": EARLIEST, "latest": LATEST}.get(text.lower())
    if word is not None:
        return word
    if not text.startswith("{"):
        limit = f"earliest, latest, or {OFFSETS_EXAMPLE}"
        raise Rejected(f"{name} is {text!r}; use {limit}", field=name, limit=limit, found=text)
    return parse_offsets(name, text, minimum=EARLIEST, example=OFFSETS_EXAMPLE)


def _without_match(given: Mapping[str, str]) -> Literal["error", "latest"]:
    name = "startingOffsetsByTimestampStrategy"
    text = given.get(name, "error").lower()
    check_choice(name, text, ("error", "latest"))
    return cast(Literal["error", "latest"], text)


def _whole_number(given: Mapping[str, str], name: str) -> int | None:
    text = given.get(name)
    if text is None:
        return None
    if not text.isdecimal() or not 1 <= int(text) <= OFFSET_MAX:
        message = f"{name} is {text!r}; use a whole number, 1 or more"
        raise Rejected(message, field=name, limit="1 or more", found=text)
    return int(text)


def flag(given: Mapping[str, str], name: str, *, default: bool) -> bool:
    """The value of an option that is true or false. Raises: Rejected for another one."""
    text = given.get(name)
    if text is None:
        return default
    check_choice(name, text.lower(), ("true", "false"))
    return text.lower() == "true"


def _read_from(given: Mapping[str, str]) -> ReadFrom:
    text = given.get("readFrom", "leader").lower()
    check_choice("readFrom", text, READ_FROM)
    return cast(ReadFrom, text)
