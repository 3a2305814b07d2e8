"""What looks at messages on their way into the store, and what is told of them.

Source: PutMessageHook (before: delay levels, timers, checks) and SendMessageHook (after), RocketMQ 5.3.3.
"""

from __future__ import annotations

from raymq.store.status import PutStatus

from .inner_message import InnerMessage


class PutHook:
    """One of `MessageStore.hooks`; they run in the order of that list, for messages put by `MessagePut`.

    Callers: any thread, several at a time.
    """

    #: for logs
    name = "hook"

    def before_put(self, message: InnerMessage) -> InnerMessage:
        """The message to store in its place: the same, or one moved to another topic.

        Raises: an error made by `put_errors.error_of` to refuse it; then nothing is stored and no later hook runs.
        """
        return message

    def after_put(self, message: InnerMessage, status: PutStatus) -> None:
        """The message, as it was stored or refused, and how. What this raises is logged and changes nothing."""
