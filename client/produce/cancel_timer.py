"""Cancels a message that waits for its delivery time."""

from __future__ import annotations

from raymq.client.handle import ClusterHandle
from raymq.client.messages.message import Receipt
from raymq.store.base.errors import Rejected
from raymq.store.base.format import SCHEDULE_TOPIC, TIMER_TOPIC


def cancel_timer(cluster: ClusterHandle, receipt: Receipt) -> bool:
    """See `Producer.cancel`."""
    if not isinstance(receipt, Receipt):
        raise Rejected(
            f"receipt is a {type(receipt).__name__}; give the Receipt of the send",
            field="receipt",
            limit="a Receipt",
        )

    if receipt.topic == SCHEDULE_TOPIC:
        raise Rejected(
            "a message of a delay level cannot be cancelled; send it with deliver_at_ms instead",
            field="receipt",
            limit="of send(deliver_at_ms=...)",
        )
    if receipt.topic != TIMER_TOPIC:
        # Its time was over when it was sent.
        return False
    if receipt.offset < 0:
        raise Rejected(
            "this receipt has no offset, because an earlier try had stored the message long before: it cannot be found",
            field="receipt",
            limit="with an offset",
            found=receipt.offset,
        )

    arguments = {"offset": receipt.offset}
    return bool(cluster.call(receipt.shard, "cancel_timer", arguments)["cancelled"])
