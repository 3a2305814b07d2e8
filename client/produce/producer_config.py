"""The options of a producer: their types, their defaults and their checks; and the error of a closed producer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from raymq.client.arguments import check_choice, check_number
from raymq.client.hooks import check_hooks
from raymq.store.base.errors import Rejected
from raymq.store.config.promise import ACKS, Acks

MIB = 1 << 20

#: unacknowledged bytes of one shard: less than a server accepts unanswered, so that the server always reads on. With
#: 4 MiB the sync waits for batches, and more than 16 MiB only fill buffers
IN_FLIGHT_BYTES = 16 * MIB


class ProducerOptions(TypedDict, total=False):
    """The keyword arguments that a producer takes. `ProducerConfig` has their defaults."""

    acks: Acks
    linger_ms: float
    batch_bytes: int
    buffer_bytes: int
    max_block_ms: int
    delivery_timeout_ms: int
    request_timeout_ms: int
    in_flight_bytes: int
    codec: str
    max_message_bytes: int
    hooks: Sequence[object]


@dataclass(frozen=True, kw_only=True)
class ProducerConfig:
    """The checked options of `Producer`, where they are described."""

    acks: Acks = "quorum"
    linger_ms: float = 5
    batch_bytes: int = 1 * MIB
    buffer_bytes: int = 64 * MIB
    max_block_ms: int = 60_000
    delivery_timeout_ms: int = 120_000
    request_timeout_ms: int = 30_000
    in_flight_bytes: int = IN_FLIGHT_BYTES
    codec: str = "bytes"
    max_message_bytes: int = 4 * MIB
    hooks: Sequence[object] = ()

    def __post_init__(self) -> None:
        """Raises: Rejected naming the option and its limit."""
        check_acks(self.acks)
        for name in ("linger_ms", "max_block_ms"):
            check_number(name, getattr(self, name), 0, whole=False)
        for name in ("delivery_timeout_ms", "request_timeout_ms"):
            check_number(name, getattr(self, name), 1, whole=False)
        for name in ("batch_bytes", "buffer_bytes", "in_flight_bytes", "max_message_bytes"):
            check_number(name, getattr(self, name), 1)
        check_hooks(self.hooks)


def check_acks(acks: str) -> None:
    """Raises: Rejected for an unknown ack mode."""
    check_choice("acks", acks, ACKS)


def closed_error() -> Rejected:
    """The error of every call of a closed producer."""
    return Rejected("the producer is closed; make another one", field="producer", limit="open")
