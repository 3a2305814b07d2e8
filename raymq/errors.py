"""Every error that RayMQ raises, by what the caller can do about it.

Each error pickles, carries `retriable`, and has its facts as attributes: `field`, `limit` and `row` of a `Rejected`,
`min` and `max` of an `OffsetOutOfRange`, and so on.

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

from raymq.store.errors import (
    Bug,
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
    "Corrupt",
    "DeliveryUnknown",
    "Fenced",
    "OffsetOutOfRange",
    "RayMQError",
    "Rejected",
    "StorageFull",
    "Unavailable",
]
