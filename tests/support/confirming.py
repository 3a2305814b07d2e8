"""The steps of the processes around a store: sync, confirm, dispatch."""

from __future__ import annotations

from raymq.store.engine.message_store import MessageStore
from raymq.store.log.commit_log import CommitLog


def confirm(store: MessageStore) -> None:
    """Everything is synced, confirmed and in the consume queues."""
    confirm_only(store)
    dispatch_all(store)


def confirm_only(store: MessageStore) -> None:
    """Everything is synced and confirmed, and waits for its dispatch."""
    store.log.sync()
    store.log.note_confirmed(store.log.end)


def dispatch_all(store: MessageStore) -> None:
    """Everything that is confirmed is in the consume queues."""
    while store.dispatched < store.log.confirmed:
        before = store.dispatched
        assert store.dispatch(store.log.confirmed) > before


def confirm_with_index(store: MessageStore) -> None:
    """Do as `confirm`, and bring everything into the index, too."""
    confirm(store)
    while store.reput.index_behind:
        before = store.index.indexed
        store.dispatch(store.log.confirmed)
        assert store.index.indexed > before


def file_bytes(log: CommitLog, offset: int) -> bytes:
    """All bytes of the commit log file that holds an offset."""
    size = log.config.segment_size_bytes
    start = offset - offset % size
    return log.reads.raw(start, start + size)
