"""The properties of a message for later delivery, as RocketMQ's timer topic has them."""

from __future__ import annotations

from raymq.store.config import StoreConfig
from raymq.store.delay.delay_hook import check_deliver_at, out_time_ms
from raymq.store.errors import Rejected
from raymq.store.format import PROPERTIES_MAX_BYTES
from raymq.store.records.producer_stamp import STAMP_BYTES
from raymq.store.records.properties import encode

#: bytes of the properties around topic and queue id
REAL_BYTES = 40
#: default limits; the shard checks again with its own options
_CONFIG = StoreConfig()


def timer_properties(deliver_at_ms: int, now_ms: int) -> bytes | None:
    """The properties of the delivery time; None for a time in the past, which means delivery at once.

    Raises: Rejected for a value that is not a time, or a time beyond the reach of timers.
    """
    if isinstance(deliver_at_ms, bool) or not isinstance(deliver_at_ms, int):
        raise Rejected(
            f"deliver_at_ms is {deliver_at_ms!r}; give ms since 1970 as an int",
            field="deliver_at_ms",
            limit="int",
        )
    if deliver_at_ms <= now_ms:
        return None
    check_deliver_at(deliver_at_ms, now_ms, _CONFIG)
    out = out_time_ms(deliver_at_ms)
    return encode({"TIMER_DELIVER_MS": str(deliver_at_ms), "TIMER_OUT_MS": str(out)})


def waiting_properties(topic: str, queue_id: int, properties: bytes | None, later: bytes) -> bytes:
    """All properties of a message in the timer topic. Raises: Rejected when they are too long."""
    real = encode({"REAL_TOPIC": topic, "REAL_QID": str(queue_id)})
    text = (properties or b"") + later + real
    if len(text) + STAMP_BYTES > PROPERTIES_MAX_BYTES:
        raise Rejected(
            f"key, tag and properties make {len(text) + STAMP_BYTES} bytes with the delivery time; the limit is "
            f"{PROPERTIES_MAX_BYTES}: put large values into the body",
            field="properties",
            limit=PROPERTIES_MAX_BYTES,
        )
    return text
