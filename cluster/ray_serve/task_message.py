"""A task as a message: which handler, with which arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from raymq.client.messages import codecs
from raymq.client.messages.codecs import CONTENT_TYPE, Codec
from raymq.client.messages.received import ReceivedMessage
from raymq.store.base.errors import Rejected

#: codecs of tasks: those of an open set of types
TASK_CODECS = ("msgpack", "json")


class Task(NamedTuple):
    """A call of a handler."""

    id: str
    name: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    #: seconds since 1970
    created_at: float


class NotATask(ValueError):
    """A message that no handler can take."""


def body_of(task: Task, codec: Codec) -> bytes:
    """The body of a task's message. Raises: Rejected for an argument of a type that the codec does not take."""
    return codec.encode(
        {
            "id": task.id,
            "task": task.name,
            "args": list(task.args),
            "kwargs": dict(task.kwargs),
            "created_at": task.created_at,
        }
    )


def task_of(message: ReceivedMessage, usual: Codec) -> Task:
    """The task of a message, which any program may have sent: only "task" is needed. Raises: NotATask.

    Args: `usual`: the codec of messages that name none.
    """
    codec = _codec_of(message, usual)
    try:
        fields = codec.decode(message.body)
    except Exception as error:
        raise NotATask(f"the body is not {codec.name}: {error}") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("task"), str):
        raise NotATask('the body needs to be a table with the field "task", the name of a handler')

    args, kwargs = fields.get("args") or [], fields.get("kwargs") or {}
    if not isinstance(args, list | tuple):
        raise NotATask(f'"args" is {type(args).__name__}, not a list')
    if not isinstance(kwargs, dict) or not all(isinstance(each, str) for each in kwargs):
        raise NotATask('"kwargs" is not a table with names')
    created_at = fields.get("created_at")
    if not isinstance(created_at, int | float):
        created_at = message.born_time_ms / 1000
    return Task(
        str(fields.get("id") or message.message_id), fields["task"], args, kwargs, created_at
    )


def _codec_of(message: ReceivedMessage, usual: Codec) -> Codec:
    name = message.properties.get(CONTENT_TYPE, usual.name)
    if name == usual.name:
        return usual
    if name not in TASK_CODECS:
        raise NotATask(f"the message names codec {name!r}; tasks have one of {TASK_CODECS}")
    return codecs.codec(name)


def checked_call(args: object, kwargs: object) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The arguments of a call, as Serve's adapters take them. Raises: Rejected."""
    if args is None:
        args = ()
    if kwargs is None:
        kwargs = {}
    if not isinstance(args, Sequence) or isinstance(args, str | bytes):
        raise Rejected(
            f"args is {type(args).__name__}; give a list of the handler's arguments",
            field="args",
            limit="a list",
        )
    if not isinstance(kwargs, Mapping):
        raise Rejected(
            f"kwargs is {type(kwargs).__name__}; give a dict of the handler's keyword arguments",
            field="kwargs",
            limit="a dict",
        )
    return args, kwargs
