"""Puts the context of OpenTelemetry's traces into the properties of messages, and makes spans of sends and reads."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from raymq.client.messages.message import Message, Receipt
from raymq.client.messages.received import ReceivedMessage
from raymq.store.base.errors import RayMQError, Rejected

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, TracerProvider

#: links of one span of a read
LINKS_MAX = 128


class TraceHook:
    """A hook of producers and consumers that continues traces from a send to the program that reads the message.

    Each send gets a span of the kind PRODUCER, from `send` to its receipt or failure. The context of that span travels
    in the message's properties, in the form that `opentelemetry.propagate` is set to: `traceparent` by default, 68
    bytes. The messages of one `poll`, or one message of an iteration, get a span of the kind CONSUMER until the program
    asks for the next ones. It links to the spans of the sends. `context_of` gives the context of one message.

    Without an SDK of OpenTelemetry nothing is recorded, and the context of the program travels all the same. It needs
    the extra `raymq[trace]`.

    Example:
        ```python
        import raymq
        from raymq.trace import TraceHook, context_of

        with raymq.connect() as cluster:
            cluster.create_topic("orders", queues=4)
            with cluster.producer(hooks=[TraceHook()]) as producer:
                producer.send("orders", b"one espresso")
            with cluster.consumer("orders", start="earliest", hooks=[TraceHook()]) as consumer:
                for message in consumer.poll(timeout=0.2):
                    parent = context_of(message)
        ```

    Args:
        tracer_provider: makes the tracer; None (default): OpenTelemetry's global one.

    Raises:
        Rejected: `opentelemetry-api` is not installed.
    """

    def __init__(self, tracer_provider: TracerProvider | None = None) -> None:
        opentelemetry = _opentelemetry()
        self._trace = opentelemetry.trace
        self._propagate = opentelemetry.propagate
        self._tracer = self._trace.get_tracer("raymq", tracer_provider=tracer_provider)
        self._lock = threading.Lock()
        #: the recording span of each send and read, by the id of what the hooks get again
        self._spans: dict[object, Span] = {}

    # --- sends ------------------------------------------------------------------------------------

    def before_send(self, message: Message) -> Message:
        """Begin a span, and return the message with its context."""
        span = self._tracer.start_span(
            f"send {message.topic}",
            kind=self._trace.SpanKind.PRODUCER,
            attributes={
                **_attributes(message.topic, "send"),
                "messaging.message.body.size": _size(message),
            },
        )
        properties = dict(message.properties)
        self._propagate.inject(properties, context=self._trace.set_span_in_context(span))
        self._keep(_span_id(span), span)
        return replace(message, properties=properties)

    def after_send(
        self, message: Message, receipt: Receipt | None, error: RayMQError | None
    ) -> None:
        """End the span of the send."""
        context = self._trace.get_current_span(context_of(message)).get_span_context()
        span = self._take((context.trace_id, context.span_id))
        if span is None:
            return
        if receipt is not None:
            span.set_attribute("messaging.destination.partition.id", str(receipt.queue_id))
            span.set_attribute("messaging.message.id", f"{receipt.queue_id}:{receipt.offset}")
        self._end(span, error)

    # --- reads ------------------------------------------------------------------------------------

    def before_consume(self, messages: Sequence[ReceivedMessage]) -> None:
        """Begin a span with links to those of the sends."""
        found = [
            self._trace.get_current_span(context_of(message)).get_span_context()
            for message in messages[:LINKS_MAX]
        ]
        span = self._tracer.start_span(
            f"process {messages[0].topic}",
            kind=self._trace.SpanKind.CONSUMER,
            links=[self._trace.Link(context) for context in found if context.is_valid],
            attributes={
                **_attributes(messages[0].topic, "process"),
                "messaging.batch.message_count": len(messages),
            },
        )
        self._keep(id(messages), span)

    def after_consume(
        self, messages: Sequence[ReceivedMessage], error: BaseException | None
    ) -> None:
        """End the span of the read."""
        span = self._take(id(messages))
        if span is not None:
            self._end(span, error)

    # --- spans ------------------------------------------------------------------------------------

    def _keep(self, key: object, span: Span) -> None:
        if span.is_recording():
            with self._lock:
                self._spans[key] = span

    def _take(self, key: object) -> Span | None:
        with self._lock:
            return self._spans.pop(key, None)

    def _end(self, span: Span, error: BaseException | None) -> None:
        if error is not None:
            span.record_exception(error)
            span.set_status(self._trace.StatusCode.ERROR, str(error))
        span.end()


def context_of(message: Message) -> Context:
    """The context that travels in a message: the parent of a span for the work on this message.

    Returns: an empty context for a message without one.
    Raises: Rejected: `opentelemetry-api` is not installed.
    """
    propagate = _opentelemetry().propagate
    from opentelemetry.context import Context

    # Not into the caller's context, which would be that of a message without any.
    found: Context = propagate.extract(message.properties, context=Context())
    return found


def _opentelemetry() -> Any:
    """The package, with its parts. Raises: Rejected."""
    try:
        import opentelemetry.propagate
        import opentelemetry.trace
    except ImportError as error:
        raise Rejected(
            "traces need opentelemetry-api; install it with `pip install 'raymq[trace]'`",
            field="hooks",
            limit="raymq[trace]",
        ) from error
    return opentelemetry


def _attributes(topic: str, operation: str) -> dict[str, str]:
    """The names are those of OpenTelemetry's conventions for messaging."""
    return {
        "messaging.system": "raymq",
        "messaging.destination.name": topic,
        "messaging.operation.type": operation,
    }


def _size(message: Message) -> int:
    return len(message.body) if isinstance(message.body, bytes) else 0


def _span_id(span: Span) -> tuple[int, int]:
    context = span.get_span_context()
    return context.trace_id, context.span_id
