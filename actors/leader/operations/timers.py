"""The operation on timers: one that waits is cancelled."""

from __future__ import annotations

from raymq.actors.api.operations import integer, operation
from raymq.store.base.format import TIMER_TOPIC
from raymq.store.delay.timer_rule import DELETE_KEY
from raymq.store.records.properties import decode
from raymq.store.records.record_decode import decode_column

from .scope import LeaderScope


def cancel_timer(leader: LeaderScope, offset: int) -> dict[str, object]:
    """Cancel the timer whose record is at an offset of the timer topic.

    Returns: whether it is cancelled: it will never be delivered. If not it was or will be delivered.
    """
    leader.check_serving()
    leader.await_dispatch()
    outcome = leader.cancel_timer(offset)
    if outcome.appended is not None:
        leader.await_promise(outcome.appended)
        return {"cancelled": True}
    return {"cancelled": _was_cancelled(leader, outcome.unique_key)}


def _was_cancelled(leader: LeaderScope, unique_key: str) -> bool:
    """Whether an earlier call, whose answer was lost, has cancelled a timer in time.

    A cancellation is put only in time, so that one that is confirmed counts.
    """
    store = leader.store
    if not store.config.message_index:
        return False
    leader.await_check()
    leader.await_dispatch()
    leader.await_index()
    found = store.query.by_keys(TIMER_TOPIC, [unique_key], exact=True).records
    texts = decode_column(found).column("properties").to_pylist()
    return any(DELETE_KEY in decode(text) for text in texts)


OPERATIONS = {"cancel_timer": operation(cancel_timer, offset=integer())}
