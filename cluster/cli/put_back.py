"""Messages that were printed or exported, as arguments of `Producer.send`: the way back into a topic.

Three forms are read: the lines of `raymq consume -o json`, the lines of `raymq store dump`, and the rows of
`raymq store export`. Body, key, tag, index keys and properties come back byte for byte. So do RocketMQ's flag, and the
bits of sysFlag that a sender sets: a reader needs them for a compressed body. A message keeps its queue id if the topic
has that queue, else its key decides. Offset, times, hosts, ids and the properties that belong to RocketMQ or RayMQ are
new.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from raymq.client.messages.fields import BY_NAME, FIELDS, INDEX_KEYS, NULL_VALUE, put_back_fields
from raymq.client.messages.keys import key_of
from raymq.client.messages.message import SYSTEM_PROPERTIES
from raymq.store.base.errors import Rejected
from raymq.store.base.format import SYS_OF_SENDER
from raymq.store.records.properties import TAGS
from raymq.store.state.topics import is_system_topic

#: fields that `send` takes in another form
_OWN_FORM = ("topic", "key", "index_keys", "body")
#: fields of a line
_FIELDS = tuple(each.name for each in FIELDS if each.json is not None and each.name != "body")
#: those that are sent as they are: key and index keys have a form of their own
_SENT = tuple(
    each.name for each in put_back_fields() if each.is_sent and each.name not in _OWN_FORM
)
#: field of a line, of `store dump` too -> its form
_FORMS = {each.name: each.json for each in FIELDS if each.json is not None}
_FORMS |= {
    name: _FORMS[field]
    for name, field in (("queueId", "queue_id"), ("props", "properties"), ("sysFlag", "flag"))
}


class PutBack(NamedTuple):
    """One message to send."""

    #: None: the line names none
    topic: str | None
    queue_id: int | None
    #: the arguments of `send` that it has
    fields: dict[str, Any]


def of_line(line: bytes, number: int) -> PutBack | None:
    """The message of a JSON line, None for a line of `store dump` that is not a message.

    Raises: Rejected naming the line.
    """
    try:
        given = json.loads(line)
        if not isinstance(given, dict):
            raise TypeError(f"it is {type(given).__name__}")
        _check_types(given)
        if "kind" in given:
            return _of_dump(given) if given["kind"] == "msg" else None
        return _of_message(given)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        message = f"line {number} is not a message: {error}"
        raise Rejected(message, field="line", row=number) from error


def of_record(
    topic: str,
    queue_id: int,
    body: bytes,
    properties: Mapping[str, str],
    *,
    flag: int = 0,
    sys_flag: int = 0,
) -> PutBack:
    """The message of a stored record: its properties hold key, tag and index keys too."""
    is_null = NULL_VALUE in properties and not body
    fields: dict[str, Any] = {"key": key_of(dict(properties))}
    fields["tag"] = properties.get(TAGS)
    fields["index_keys"] = tuple(properties.get(INDEX_KEYS, "").split())
    fields["properties"] = {
        name: value for name, value in properties.items() if name not in SYSTEM_PROPERTIES
    }
    fields |= {"flag": flag, "sys_flag": sys_flag & SYS_OF_SENDER}
    return PutBack(topic, queue_id, {**_present(fields), "body": None if is_null else body})


def _check_types(given: Mapping[str, object]) -> None:
    """Raises: TypeError for a field that is something else than it must be."""
    for name, value in given.items():
        form = _FORMS.get(name)
        if form is None or form.fits is None or value is None:
            continue
        if not form.fits(value):
            raise TypeError(f"{name} is {json.dumps(value)}; give {form.wanted}")


def _of_dump(given: dict[str, Any]) -> PutBack:
    body = base64.b64decode(given["body64"], validate=True)
    return of_record(
        given["topic"],
        given["queueId"],
        body,
        given["props"],
        flag=given.get("flag") or 0,
        sys_flag=given.get("sysFlag") or 0,
    )


def _of_message(given: dict[str, Any]) -> PutBack:
    bodies = {"body", "body_base64"} & set(given)
    unknown = set(given) - bodies - {"key_base64", *_FIELDS}
    if unknown or len(bodies) != 1:
        raise ValueError(
            f"it has the fields {sorted(given)}; body or body_base64 is needed, key_base64, {', '.join(_FIELDS)} are "
            "optional"
        )
    fields = {name: given.get(name) for name in _SENT}
    fields["key"] = _key(given)
    fields["index_keys"] = tuple(given.get("index_keys") or ())
    # A body of None is a null value.
    fields = {**_present(fields), "body": _body(given)}
    return PutBack(given.get("topic"), given.get("queue_id"), fields)


def _body(given: dict[str, Any]) -> bytes | None:
    if "body_base64" in given:
        return base64.b64decode(given["body_base64"], validate=True)
    body = given["body"]
    if body is None:
        return None
    # Text goes as it is. Anything else as the JSON it came as.
    return body.encode() if isinstance(body, str) else json.dumps(body).encode()


def _key(given: dict[str, Any]) -> bytes | None:
    if given.get("key_base64") is not None:
        return base64.b64decode(given["key_base64"], validate=True)
    return None if given.get("key") is None else str(given["key"]).encode()


def _present(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields that are not their defaults. An empty body or key counts as a field."""
    return {
        name: value
        for name, value in fields.items()
        if value not in (None, {}) and value != BY_NAME[name].default
    }


class Sender:
    """Sends messages back to their topics, and counts them."""

    def __init__(self, cluster: Any, producer: Any) -> None:
        #: topic -> how many messages were sent to it
        self.sent: dict[str, int] = {}
        #: records of internal topics: nothing was sent for them
        self.left_out = 0
        self._producer = producer
        self._queues = {name: int(facts["queues"]) for name, facts in cluster.topics().items()}

    def send(self, message: PutBack, *, topic: str | None = None) -> None:
        """Send the message to `topic`, by default to its own. Raises: the immediate errors of `Producer.send`."""
        if is_system_topic(message.topic or ""):
            self.left_out += 1
            return
        to = topic or str(message.topic)
        fields = message.fields
        if message.queue_id is not None and message.queue_id < self._queues.get(to, 0):
            fields = {**fields, "queue_id": message.queue_id}
        self._producer.send(to, **fields)
        self.sent[to] = self.sent.get(to, 0) + 1

    def summary(self) -> str:
        """The result in one line."""
        total = sum(self.sent.values())
        words = f"{total} messages stored in {', '.join(sorted(self.sent)) or 'no topic'}"
        if self.left_out:
            words += f"; {self.left_out} records of internal topics left out"
        return words

    def facts(self) -> dict[str, object]:
        """The same, as JSON."""
        return {"sent": sum(self.sent.values()), "topics": self.sent, "left_out": self.left_out}
