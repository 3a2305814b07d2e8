"""Hooks that see messages on their way into the store, and the results of their puts.

Source: PutMessageHook (before: delay levels, timers, checks) and SendMessageHook (after), RocketMQ 5.3.3.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

from raymq.store.base.errors import Rejected
from raymq.store.base.status import PutStatus
from raymq.store.records.record_check import check_columns
from raymq.store.records.requests import AppendedRows, PutRequest
from raymq.store.records.small_batch import SmallBatch
from raymq.store.state.shard_state import TopicInfo

from .inner_message import InnerMessage

logger = logging.getLogger("raymq.store")


class PutHook:
    """One of `MessageStore.hooks`, which run in the order of that list. Puts of the store's services bypass all hooks.

    A hook sees messages of `MessagePut` one by one, and columns as they are. Callers: any thread, several at a time.
    """

    #: for logs
    name = "hook"

    def before_put(self, message: InnerMessage) -> InnerMessage:
        """The message to store in its place: the same, or one moved to another topic.

        Raises: an error made by `put_errors.error_of` to refuse it; then nothing is stored and no later hook runs.
        """
        return message

    def after_put(self, message: InnerMessage, status: PutStatus) -> None:
        """Called with the message as it was stored or refused, and the status. Exceptions are only logged."""

    def before_batch(self, request: PutRequest) -> PutRequest:
        """The columns to store in their place: the same, or others with as many rows for the same queue.

        `request.batch` is a RecordBatch of `record.PUT_SCHEMA`, perhaps with columns of `record.MORE_SCHEMA` after it,
        or a `record.SmallBatch` of a few rows. Raises: as `before_put`.
        """
        return request

    def after_batch(self, request: PutRequest, appended: AppendedRows | None) -> None:
        """Called with the place of the columns; None: they were refused, or stored in part. Exceptions are logged.

        Not called for columns that still waited to be appended when their shard stopped writing. Unlike `after_put`, it
        is called before the flush and the replicas.
        """


class TopicGuard(Protocol):
    """Opens one system topic to the columns that users put: checks all that a put to it must satisfy."""

    #: the largest record that may go there
    record_bytes_max: int

    def check_batch(self, request: PutRequest, topics: Mapping[str, TopicInfo]) -> None:
        """Refuse columns that the topic cannot take. Their schema and lengths were checked before.

        Raises: Rejected, Unavailable; then nothing is stored.
        """


def before_batch(hooks: Sequence[PutHook], request: PutRequest) -> PutRequest:
    """Columns after every hook. Raises: the error of a hook; Rejected for a change that would break sequences."""
    checked = isinstance(request.batch, SmallBatch)
    for hook in hooks:
        if type(hook).before_batch is PutHook.before_batch:
            continue
        if not checked:
            # Hooks may trust the columns.
            check_columns(request.batch)
            checked = True

        found = hook.before_batch(request)
        if found is not request:
            same_target = found._replace(batch=request.batch, body_crcs=None) == request._replace(
                body_crcs=None
            )
            if not same_target or found.batch.num_rows != request.batch.num_rows:
                raise Rejected(
                    f"put hook {hook.name} may change the values of rows, not their number, queue or producer",
                    field="hook",
                    limit="as many rows, the same queue",
                )

            if found.batch is not request.batch:
                # The bodies may be others.
                found = found._replace(body_crcs=None)
            request = found
    return request


def after_batch(
    hooks: Sequence[PutHook], request: PutRequest, appended: AppendedRows | None
) -> None:
    """Call every hook."""
    for hook in hooks:
        try:
            hook.after_batch(request, appended)
        except Exception:
            # The message stays stored.
            logger.exception("put hook %s", hook.name)
