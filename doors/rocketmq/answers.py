"""What a client is answered when a request fails: RayMQ's errors as RocketMQ's response codes."""

from __future__ import annotations

from raymq.store.base.errors import (
    DeliveryUnknown,
    RayMQError,
    Rejected,
    StorageFull,
    TopicDeleted,
    TopicMissing,
    Unavailable,
)
from raymq.store.base.status import PutStatus

from .codes import ResponseCode


class Refused(Exception):
    """A request that is answered with a code of its own."""

    def __init__(self, code: ResponseCode, remark: str) -> None:
        super().__init__(remark)
        self.code = code
        self.remark = remark


def response_code(error: BaseException) -> ResponseCode:
    """The code for an error. Clients send again after some of them: see `docs/guides/from-rocketmq.md`."""
    if isinstance(error, Refused):
        return error.code
    if isinstance(error, (TopicMissing, TopicDeleted)):
        return ResponseCode.TOPIC_NOT_EXIST
    if isinstance(error, DeliveryUnknown):
        is_flush = error.fields.get("status") == PutStatus.FLUSH_DISK_TIMEOUT.value
        return ResponseCode.FLUSH_DISK_TIMEOUT if is_flush else ResponseCode.FLUSH_SLAVE_TIMEOUT
    if isinstance(error, (Unavailable, StorageFull)):
        return ResponseCode.SERVICE_NOT_AVAILABLE
    if isinstance(error, Rejected):
        return ResponseCode.MESSAGE_ILLEGAL
    return ResponseCode.SYSTEM_ERROR


def remark_of(error: BaseException) -> str:
    """The text for an error, which users read in their client's exception."""
    if isinstance(error, Refused):
        return error.remark
    return str(error) if isinstance(error, RayMQError) else f"a fault of the server: {error!r}"
