"""The mapping between RocketMQ's put statuses and RayMQ's errors, and the refusal of too large records.

The table for operators is in docs/operating/runbook.md.
"""

from __future__ import annotations

from raymq.store.base.errors import (
    DeliveryUnknown,
    PropertiesTooLong,
    RayMQError,
    Rejected,
    StorageFull,
    Unavailable,
)
from raymq.store.base.status import PutStatus
from raymq.store.config.store_config import StoreConfig

#: the error that each status is raised as; PUT_OK is not an error
ERRORS: dict[PutStatus, type[RayMQError]] = {
    # Stored, but not as promised in time: these count as sent in RocketMQ.
    PutStatus.FLUSH_DISK_TIMEOUT: DeliveryUnknown,
    PutStatus.FLUSH_SLAVE_TIMEOUT: DeliveryUnknown,
    PutStatus.SLAVE_NOT_AVAILABLE: DeliveryUnknown,
    # Nothing stored, may work later.
    PutStatus.SERVICE_NOT_AVAILABLE: Unavailable,
    PutStatus.CREATE_MAPPED_FILE_FAILED: Unavailable,
    PutStatus.OS_PAGE_CACHE_BUSY: Unavailable,
    PutStatus.IN_SYNC_REPLICAS_NOT_ENOUGH: Unavailable,
    PutStatus.PUT_TO_REMOTE_BROKER_FAIL: Unavailable,
    PutStatus.WHEEL_TIMER_FLOW_CONTROL: Unavailable,
    # Nothing stored, the message is wrong.
    PutStatus.MESSAGE_ILLEGAL: Rejected,
    PutStatus.PROPERTIES_SIZE_EXCEEDED: Rejected,
    PutStatus.LMQ_CONSUME_QUEUE_NUM_EXCEEDED: Rejected,
    PutStatus.WHEEL_TIMER_MSG_ILLEGAL: Rejected,
    PutStatus.WHEEL_TIMER_NOT_ENABLE: Rejected,
    PutStatus.UNKNOWN_ERROR: DeliveryUnknown,
}


def error_of(status: PutStatus, message: str, **fields: object) -> RayMQError:
    """The error that a status is raised as, with the status in it."""
    return ERRORS[status](message, status=status.value, **fields)


def check_record_size(
    config: StoreConfig, row: int, nbytes: int, *, limit: int | None = None
) -> None:
    """Refuse a record that no file, or no pool, has room for.

    Args: `limit`: None is the store's. A smaller one is of messages that wait. Raises: Rejected.
    """
    of_store = config.record_bytes_max
    limit = of_store if limit is None else limit

    if limit < nbytes <= of_store:
        raise Rejected(
            f"row {row} makes a record of {nbytes} bytes; that of a message that waits for its delivery may have "
            f"{limit}: send less body or fewer properties, or let it be delivered at once",
            field="record",
            limit=limit,
            row=row,
        )

    if nbytes > limit:
        pool = config.transient_pool_bytes if config.transient_pool else 0
        through = f" and a transient pool of {pool} bytes" if pool else ""
        raise Rejected(
            f"row {row} makes a record of {nbytes} bytes; with commit log files of {config.segment_size_bytes} bytes"
            f"{through} a record may have {limit}",
            field="record",
            limit=limit,
            row=row,
        )


def status_of(error: BaseException) -> PutStatus:
    """RocketMQ's answer to a put that raises `error` here."""
    if not isinstance(error, RayMQError):
        return PutStatus.UNKNOWN_ERROR
    said = error.fields.get("status")
    if said in PutStatus.__members__:
        return PutStatus(said)
    if isinstance(error, Rejected):
        if isinstance(error, PropertiesTooLong):
            return PutStatus.PROPERTIES_SIZE_EXCEEDED
        return PutStatus.MESSAGE_ILLEGAL
    if isinstance(error, StorageFull):
        # Creating a file reserves all its bytes, so a full disk fails there.
        return PutStatus.CREATE_MAPPED_FILE_FAILED
    if isinstance(error, Unavailable):
        return PutStatus.SERVICE_NOT_AVAILABLE
    return PutStatus.UNKNOWN_ERROR
