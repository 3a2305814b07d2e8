"""OpenTelemetry: traces from a send to the program that reads the message. Needs the extra `raymq[trace]`.

Example:
    ```python
    import raymq
    from raymq.trace import TraceHook

    with raymq.connect() as cluster:
        cluster.create_topic("traced", queues=1)
        with cluster.producer(hooks=[TraceHook()]) as producer:
            producer.send("traced", b"with the context of this program")
    ```
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raymq._lazy import lazy_names

if TYPE_CHECKING:
    from raymq.client.tracing import TraceHook, context_of

__all__ = ["TraceHook", "context_of"]

__getattr__ = lazy_names(
    __name__,
    {"TraceHook": "raymq.client.tracing", "context_of": "raymq.client.tracing"},
)


def __dir__() -> list[str]:
    return sorted(__all__)
