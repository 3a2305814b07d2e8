"""The columns of a write: which a DataFrame may have, and the topics to which its rows go."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Mapping, Sequence

from raymq.client.messages.topic_schema import spark_type
from raymq.client.messages.topic_values import TopicValues
from raymq.client.messages.write_columns import SinkTopic, by_queue, refuse_later
from raymq.store.base.errors import Rejected

__all__ = ["COLUMNS", "SinkTopic", "by_queue", "check_columns", "check_direct", "targets"]

#: column -> its types in Spark
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "key": ("binary", "string"),
    "value": ("binary", "string"),
    "topic": ("string",),
    "partition": ("int",),
    "tag": ("string",),
    "headers": ("array<struct<key:string,value:binary>>",),
    "properties": ("map<string,string>",),
    "index_keys": ("array<string>",),
    "deliver_at": ("timestamp",),
}


def targets(topics: Mapping[str, Mapping[str, object]], topic: str | None) -> dict[str, SinkTopic]:
    """The topics to which rows may go, by name. Raises: Rejected if `topic`, that of all rows, does not exist."""
    if topic is not None and topic not in topics:
        raise Rejected(
            f"topic {topic!r} does not exist; create it: raymq topic create {shlex.quote(topic)}",
            field="topic",
            limit="an existing topic",
            found=topic,
        )
    if topic is not None:
        return {topic: SinkTopic.of(topic, topics[topic])}
    found = {}
    for name, facts in topics.items():
        # A topic whose schema this version does not know is not a target, and does not disturb the others.
        with contextlib.suppress(Rejected):
            found[name] = SinkTopic.of(name, facts)
    return found


def check_columns(
    given: Sequence[tuple[str, str]], *, topic: str | None, values: TopicValues | None = None
) -> None:
    """Check the columns of a DataFrame: name and type of each, the type as Spark's `simpleString` writes it.

    Args: `values`: of the topic of all rows, if that is known.
    Raises: Rejected naming a column that is missing, unknown or of another type.
    """
    values = values or TopicValues(topic or "")
    others = dict(COLUMNS)
    if values.schema is not None:
        del others["value"]
        values.check_names([name for name, _ in given], list(others))
        others |= {each.name: (spark_type(each.type),) for each in values.schema}
    for name, kind in given:
        if name not in others:
            message = (
                f"unknown column {name!r}; a topic takes {', '.join(others)}. raymq.spark.to_value makes one value of "
                "several columns, or create the topic with a schema"
            )
            raise Rejected(message, field=name, limit=", ".join(others), found=name)
        kinds = others[name]
        if kind not in kinds:
            advice = "make it one with raymq.spark.to_value" if name == "value" else "cast it"
            message = f"column {name} has type {kind}, expected {' or '.join(kinds)}; {advice}"
            raise Rejected(message, field=name, limit=" or ".join(kinds), found=kind)

    names = [name for name, _ in given]
    if values.schema is None and "value" not in names:
        message = f"the DataFrame has columns {names}; `value` (binary or string) is needed"
        raise Rejected(message, field="value", limit=", ".join(COLUMNS), found=names)
    if topic is None and "topic" not in names:
        message = "no topic is given; set the option `topic`, or add a column `topic`"
        raise Rejected(message, field="topic", limit="an option or a column")


def check_direct(names: Sequence[str]) -> None:
    """Check the columns of a direct write. Raises: Rejected for one that needs a staged write."""
    if "deliver_at" in names:
        refuse_later()
