"""Every error that RayMQ raises, sorted by the caller's next step.

Each error pickles, carries `retriable`, and has its facts as attributes. A `Rejected` has `field`, `limit` and `row`,
an `OffsetOutOfRange` has `min` and `max`, and so on.

Example:
    ```python
    import raymq
    from raymq.errors import Rejected

    with raymq.start("raymq-data") as cluster:
        try:
            cluster.create_topic("not a topic name")
        except Rejected as error:
            print(error.field, error.retriable)
    ```
"""

from __future__ import annotations

from raymq.store.base.errors import (
    Bug,
    CommitUnknown,
    Corrupt,
    DeliveryUnknown,
    Fenced,
    OffsetOutOfRange,
    RayMQError,
    Rejected,
    StorageFull,
    Unavailable,
)

__all__ = [
    "Bug",
    "CommitUnknown",
    "Corrupt",
    "DeliveryUnknown",
    "Fenced",
    "OffsetOutOfRange",
    "RayMQError",
    "Rejected",
    "StorageFull",
    "Unavailable",
]
