"""The storage engine, for programs that embed it: one shard on one disk, without Ray and without a network.

`EmbeddedStore` opens a store in this process. The engine has a feature that a cluster does not offer yet: transactions.
"""

# The folders, from the outermost layer to the innermost; each imports only those after it (`lint-imports`):
# embedded engine tools services config_files compaction delay put index queues log groups records state config base

from __future__ import annotations

from typing import TYPE_CHECKING

from raymq._lazy import lazy_names

if TYPE_CHECKING:
    from .base.status import PutStatus
    from .config.store_config import StoreConfig
    from .embedded.embedded_store import EmbeddedStore
    from .embedded.put_message import PutResult
    from .index.query import QueryResult
    from .put.inner_message import InnerMessage
    from .put.put_hooks import PutHook
    from .queues.expression_filter import expression_filter
    from .queues.get_message import GetMessageResult
    from .queues.message_filter import MessageFilter
    from .queues.raw_records import decode_records
    from .records.properties import decode as decode_properties
    from .records.record import PUT_SCHEMA, RECORD_SCHEMA
    from .records.requests import AppendedRows, FetchSlice, PutRequest
    from .records.rows import producer_stamps
    from .services.resolutions import Resolution
    from .services.transaction import Half
    from .tools.inspect import verify

__all__ = [
    "PUT_SCHEMA",
    "RECORD_SCHEMA",
    "AppendedRows",
    "EmbeddedStore",
    "FetchSlice",
    "GetMessageResult",
    "Half",
    "InnerMessage",
    "MessageFilter",
    "PutHook",
    "PutRequest",
    "PutResult",
    "PutStatus",
    "QueryResult",
    "Resolution",
    "StoreConfig",
    "decode_properties",
    "decode_records",
    "expression_filter",
    "producer_stamps",
    "verify",
]

__getattr__ = lazy_names(
    __name__,
    {
        "PUT_SCHEMA": "raymq.store.records.record",
        "RECORD_SCHEMA": "raymq.store.records.record",
        "AppendedRows": "raymq.store.records.requests",
        "EmbeddedStore": "raymq.store.embedded.embedded_store",
        "FetchSlice": "raymq.store.records.requests",
        "GetMessageResult": "raymq.store.queues.get_message",
        "Half": "raymq.store.services.transaction",
        "InnerMessage": "raymq.store.put.inner_message",
        "MessageFilter": "raymq.store.queues.message_filter",
        "PutHook": "raymq.store.put.put_hooks",
        "PutRequest": "raymq.store.records.requests",
        "PutResult": "raymq.store.embedded.put_message",
        "PutStatus": "raymq.store.base.status",
        "QueryResult": "raymq.store.index.query",
        "Resolution": "raymq.store.services.resolutions",
        "StoreConfig": "raymq.store.config.store_config",
        "decode_properties": "raymq.store.records.properties:decode",
        "decode_records": "raymq.store.queues.raw_records",
        "expression_filter": "raymq.store.queues.expression_filter",
        "producer_stamps": "raymq.store.records.rows",
        "verify": "raymq.store.tools.inspect",
    },
)


def __dir__() -> list[str]:
    return sorted(__all__)
