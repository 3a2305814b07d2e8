"""Calls the hooks of a producer or a consumer: objects that look at messages on their way.

Source: SendMessageHook and ConsumeMessageHook of the clients of RocketMQ 5.3.3, and the interceptors of Kafka. There as
here a hook that fails does not fail the client.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from raymq.client.messages.message import Message, Receipt
from raymq.client.messages.received import ReceivedMessage
from raymq.store.base.errors import RayMQError, Rejected

logger = logging.getLogger("raymq.hooks")

#: what a hook may have. It needs one of them
METHODS = ("before_send", "after_send", "before_consume", "after_consume")


def check_hooks(hooks: object) -> None:
    """Raises: Rejected unless this is a list of objects that have a method of a hook."""
    limit = "objects with a method of " + ", ".join(METHODS)
    if not isinstance(hooks, Sequence) or isinstance(hooks, str):
        message = f"hooks is {hooks!r}; give a list of {limit}"
        raise Rejected(message, field="hooks", limit=limit)
    for hook in hooks:
        if isinstance(hook, type):
            message = f"hooks has the class {hook.__name__}; give an object of it"
            raise Rejected(message, field="hooks", limit=limit)
        if not any(callable(getattr(hook, name, None)) for name in METHODS):
            message = f"hooks has {hook!r}, which has none of the methods {', '.join(METHODS)}"
            raise Rejected(message, field="hooks", limit=limit)


@dataclass
class HookFailures:
    """Counts failed calls, and logs the first one of each kind."""

    count: int = 0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._logged: set[tuple[str, str, str]] = set()

    def note(self, hook: object, method: str, error: Exception) -> None:
        """Count a failure. Callers: any thread, in an `except` block."""
        kind = (type(hook).__name__, method, type(error).__name__)
        with self._lock:
            self.count += 1
            is_first = kind not in self._logged
            self._logged.add(kind)
        if is_first:
            logger.exception(
                "hook %s.%s raised %s; the message goes on, and more failures of this kind are only counted",
                *kind,
            )


class Hooks:
    """The hooks of one client, called in their order. Threads: any."""

    def __init__(self, hooks: Sequence[object]) -> None:
        self.failures = HookFailures()
        self._by_method = {
            name: [hook for hook in hooks if callable(getattr(hook, name, None))]
            for name in METHODS
        }

    @classmethod
    def of(cls, hooks: Sequence[object]) -> Hooks | None:
        """None without a hook: then nothing is called for any message."""
        return cls(hooks) if hooks else None

    def before_send(self, message: Message) -> Message:
        """The message to send, which a hook may have replaced."""
        for hook in self._by_method["before_send"]:
            try:
                found = hook.before_send(message)  # type: ignore[attr-defined]
                if found is not None and not isinstance(found, Message):
                    raise TypeError(f"before_send returned {found!r}; return a Message, or None")
                message = message if found is None else found
            except Exception as error:
                self.failures.note(hook, "before_send", error)
        return message

    def after_send(self, message: Message, outcome: Receipt | RayMQError) -> None:
        """Report the receipt of a message, or why there is none."""
        is_failure = isinstance(outcome, RayMQError)
        receipt, error = (None, outcome) if is_failure else (outcome, None)
        self._call("after_send", message, receipt, error)

    def before_consume(self, messages: Sequence[ReceivedMessage]) -> None:
        """Report messages that the program gets now."""
        self._call("before_consume", messages)

    def after_consume(
        self, messages: Sequence[ReceivedMessage], error: BaseException | None
    ) -> None:
        """Report messages that the program is done with. Args: `error`: by which its block ended."""
        self._call("after_consume", messages, error)

    def _call(self, method: str, *arguments: object) -> None:
        for hook in self._by_method[method]:
            try:
                getattr(hook, method)(*arguments)
            except Exception as error:
                self.failures.note(hook, method, error)
