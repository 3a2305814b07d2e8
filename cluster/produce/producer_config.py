"""The options of a producer."""

from __future__ import annotations

from dataclasses import dataclass

from raymq.cluster.arguments import check_number
from raymq.store.promise import Acks

from .batch_sender import IN_FLIGHT_BYTES, MIB, check_acks


@dataclass(frozen=True, kw_only=True)
class ProducerConfig:
    """Options of `Producer` and `AsyncProducer`."""

    #: "quorum": stored on a majority; "leader": on one machine
    acks: Acks = "quorum"
    #: how long a message waits for company; asking for a receipt ends the wait
    linger_ms: float = 5
    #: a batch of this size goes at once
    batch_bytes: int = 1 * MIB
    #: unacknowledged bytes beyond which `send` blocks
    buffer_bytes: int = 64 * MIB
    #: ...for so long, then it raises Unavailable
    max_block_ms: int = 60_000
    #: a message that is not acknowledged by then has failed
    delivery_timeout_ms: int = 120_000
    #: a shard that says nothing for so long is left and asked again
    request_timeout_ms: int = 30_000
    #: bytes under way to one shard
    in_flight_bytes: int = IN_FLIGHT_BYTES
    #: what makes bytes of `send`'s body: bytes, json, msgpack, arrow-ipc
    codec: str = "bytes"
    #: largest body; the cluster's own limit holds as well
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
