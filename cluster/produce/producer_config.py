"""The checked options of a producer."""

from __future__ import annotations

from dataclasses import dataclass

from raymq.cluster.arguments import check_number
from raymq.store.promise import Acks

from .batch_sender import IN_FLIGHT_BYTES, MIB, check_acks


@dataclass(frozen=True, kw_only=True)
class ProducerConfig:
    """The options of `Producer`, where they are described."""

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

    def __post_init__(self) -> None:
        """Raises: Rejected naming the option and its limit."""
        check_acks(self.acks)
        for name in ("linger_ms", "max_block_ms"):
            check_number(name, getattr(self, name), 0, whole=False)
        for name in ("delivery_timeout_ms", "request_timeout_ms"):
            check_number(name, getattr(self, name), 1, whole=False)
        for name in ("batch_bytes", "buffer_bytes", "in_flight_bytes", "max_message_bytes"):
            check_number(name, getattr(self, name), 1)
