"""The sends of a producer that has hooks: each message passes them before it is encoded, and its outcome after."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from raymq.client.hooks import Hooks
from raymq.client.messages.message import Message
from raymq.store.base.errors import RayMQError

from .message_encoder import EncodedMessage, MessageEncoder
from .send_future import SendFuture


class HookedSends:
    """Encodes messages as hooks leave them, and gives the hooks the outcome of each. Threads: any."""

    def __init__(self, encoder: MessageEncoder, hooks: Hooks) -> None:
        self.hooks = hooks
        self._encoder = encoder

    def encode(self, topic: str | Message, *arguments: Any, **named: Any) -> EncodedMessage:
        """`MessageEncoder.encode`, whose arguments it takes, between the hooks.

        Raises: as that does. The hooks get the error of a message that they have seen.
        """
        message, queue_id, acks = self._encoder.message_of(topic, *arguments, **named)
        message = self.hooks.before_send(message)
        try:
            made = self._encoder.encode(message, queue_id=queue_id, acks=acks)
        except RayMQError as error:
            self.hooks.after_send(message, error)
            raise
        made.hooked = message
        return made

    def encode_all(self, messages: Iterable[Message], **named: Any) -> list[EncodedMessage]:
        """`encode` of messages that are sent together. Raises: as that does; then none of them is sent."""
        made: list[EncodedMessage] = []
        try:
            for message in messages:
                made.append(self.encode(message, **named))
        except RayMQError as error:
            self.fail(made, error)
            raise
        return made

    def fail(self, messages: Iterable[EncodedMessage], error: RayMQError) -> None:
        """Report messages of which none is sent."""
        for each in messages:
            self.after_send(each, error)

    def after_send(self, message: EncodedMessage, error: RayMQError) -> None:
        """Report a message that is not sent."""
        if message.hooked is not None:
            self.hooks.after_send(message.hooked, error)

    def send(
        self, message: EncodedMessage, send: Callable[[EncodedMessage], SendFuture]
    ) -> SendFuture:
        """Send a message whose outcome the hooks get. Raises: as `send`."""
        try:
            future = send(message)
        except RayMQError as error:
            self.after_send(message, error)
            raise
        self.watch(message, future)
        return future

    def send_many(
        self,
        messages: Sequence[EncodedMessage],
        send: Callable[[Sequence[EncodedMessage]], list[SendFuture]],
    ) -> list[SendFuture]:
        """`send` of messages that are sent together."""
        try:
            futures = send(messages)
        except RayMQError as error:
            self.fail(messages, error)
            raise
        for message, future in zip(messages, futures, strict=True):
            self.watch(message, future)
        return futures

    def watch(
        self,
        message: EncodedMessage,
        future: SendFuture,
        call: Callable[[Callable[[], None]], None] = lambda report: report(),
    ) -> None:
        """Report the outcome when it is there. Args: `call`: calls its argument, perhaps on another thread."""
        hooked = message.hooked
        if hooked is not None:
            future.add_done_callback(
                lambda done: call(partial(self.hooks.after_send, hooked, done.peek()))
            )
