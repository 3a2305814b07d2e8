"""The context of a trace travels in messages."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from raymq.client.messages.message import Message
from raymq.client.tracing import TraceHook, context_of
from raymq.store.base.errors import Rejected
from tests.support.served_shard import ServedShard


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedShard]:
    with ServedShard(tmp_path_factory.mktemp("traces") / "shard") as served:
        served.start_flusher()
        served.cluster.create_topic("t", queues=1)
        yield served


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def provider(spans: InMemorySpanExporter) -> TracerProvider:
    made = TracerProvider()
    made.add_span_processor(SimpleSpanProcessor(spans))
    return made


def test_a_trace_goes_on_from_the_send_to_the_reader(
    shard: ServedShard, spans: InMemorySpanExporter, provider: TracerProvider
) -> None:
    hook = TraceHook(provider)
    with shard.cluster.producer(hooks=[hook]) as producer:
        with provider.get_tracer("program").start_as_current_span("order") as order:
            sent = [producer.send("t", b"12345", properties={"own": "kept"}) for _ in range(3)]
        offsets = [each.result(10).offset for each in sent]
        with pytest.raises(Rejected):
            producer.send("missing", b"x")
    with shard.cluster.consumer("t", start=offsets[0], hooks=[hook]) as consumer:
        found: list[Any] = []
        while len(found) < 3:
            found += consumer.poll(timeout=10)

    finished = spans.get_finished_spans()
    assert not hook._spans
    sends = [each for each in finished if each.name == "send t"]
    assert [each.kind for each in sends] == [SpanKind.PRODUCER] * 3
    assert {each.parent.span_id for each in sends} == {order.get_span_context().span_id}
    assert sends[0].attributes["messaging.message.body.size"] == 5
    assert {each.attributes["messaging.message.id"] for each in sends} == {
        f"0:{offset}" for offset in offsets
    }
    (failed,) = [each for each in finished if each.name == "send missing"]
    assert failed.status.status_code is StatusCode.ERROR

    reads = [each for each in finished if each.name == "process t"]
    assert {each.kind for each in reads} == {SpanKind.CONSUMER}
    linked = {link.context.span_id for each in reads for link in each.links}
    assert linked == {each.context.span_id for each in sends}
    for message in found:
        assert message.properties["own"] == "kept"
        parent = trace.get_current_span(context_of(message)).get_span_context()
        assert parent.trace_id == order.get_span_context().trace_id
        assert parent.span_id in linked


def test_without_an_sdk_the_context_of_the_program_travels(shard: ServedShard) -> None:
    # The global provider of this process has no SDK.
    assert not isinstance(trace.get_tracer_provider(), TracerProvider)
    hook = TraceHook()
    context = trace.SpanContext(5, 7, is_remote=False, trace_flags=trace.TraceFlags(1))
    with trace.use_span(trace.NonRecordingSpan(context)):
        message = hook.before_send(Message(topic="t", body=b"x"))
    assert message.properties == {"traceparent": f"00-{5:032x}-{7:016x}-01"}
    assert trace.get_current_span(context_of(message)).get_span_context().span_id == 7
    hook.after_send(message, None, Rejected("no"))
    assert not hook._spans


def test_a_message_without_a_context_has_an_empty_one(provider: TracerProvider) -> None:
    with provider.get_tracer("program").start_as_current_span("mine"):
        found = trace.get_current_span(context_of(Message(topic="t", body=b"x")))
    assert not found.get_span_context().is_valid


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def absent(name: str, *arguments: Any, **options: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", absent)
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.delitem(sys.modules, name)
    for call in (TraceHook, lambda: context_of(Message(topic="t", body=b"x"))):
        with pytest.raises(Rejected, match=r"raymq\[trace\]"):
            call()
