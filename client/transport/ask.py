"""Asks several shards at the same time, so that a silent shard delays only its own answer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, as_completed
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TypeVar

from raymq.client.client_thread import ClientThread
from raymq.store.base.errors import (
    AnotherShard,
    Bug,
    DeliveryUnknown,
    NotLeading,
    NotReached,
    NotServing,
    RayMQError,
    Unavailable,
)
from raymq.store.base.status import PutStatus

Answer = TypeVar("Answer")

#: between two searches for the leader of a shard: doubled with each one
SEARCH_PAUSE_MS = 50
SEARCH_PAUSE_MS_MAX = 400
#: a replica that runs says at once who leads
LEADER_TIMEOUT_S = 1.0
#: a stream or call without an answer for this long may be at a replica that leads no more: the others are asked
SILENT_MS = 2_000


def moved(error: RayMQError) -> bool:
    """Whether the shard no longer answers at its last known endpoint: nothing listens there, or another shard does."""
    return isinstance(error, (AnotherShard, Unavailable))


def may_lead_no_more(error: RayMQError) -> bool:
    """Whether another replica may lead: this one does not answer, refuses, or does not know an outcome."""
    return isinstance(error, DeliveryUnknown) or moved(error)


def leads_no_more(error: RayMQError) -> bool:
    """Whether an error is the refusal of a replica that does not lead, or whose epoch has not begun or is over."""
    return isinstance(error, (NotLeading, NotServing))


def may_have_run(error: RayMQError) -> bool:
    """Whether a call that failed so may have run all the same: its answer was lost."""
    if isinstance(error, DeliveryUnknown):
        return True
    return isinstance(error, Unavailable) and not (
        leads_no_more(error) or isinstance(error, NotReached)
    )


def search_pauses() -> Iterator[int]:
    """The pauses between the searches for a leader, in milliseconds, without an end."""
    pause_ms = SEARCH_PAUSE_MS
    while True:
        yield pause_ms
        pause_ms = min(2 * pause_ms, SEARCH_PAUSE_MS_MAX)


def in_thread(call: Callable[[], Answer], name: str) -> Future[Answer]:
    """Call `call` in a thread of its own, which no exit of the process waits for."""
    answer: Future[Answer] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            # Without an answer its caller would wait for ever.
            answer.set_exception(error)

    try:
        ClientThread(run, name).start()
    except RuntimeError as error:
        # At the limit of threads, and with Python 3.12 at the end of the program.
        answer.set_exception(Unavailable(f"no thread could be started: {error}"))
    return answer


def ask(
    shards: Iterable[int], begin: Callable[[int], Future[Answer]], *, timeout_s: float
) -> Iterator[tuple[int, Answer | RayMQError]]:
    """Begin a call at every shard. Yields: (shard, answer or error), the fastest first.

    `shards` may be other numbers that `begin` knows. A shard without an answer after `timeout_s` yields
    DeliveryUnknown. Its call goes on until its own end. The caller may leave Ray before that, and a process that uses
    Ray while leaving it dies. So a thread must not call Ray.
    """
    begun: dict[Future[Answer], int] = {}
    for shard in shards:
        try:
            begun[begin(shard)] = shard
        except RayMQError as error:
            yield shard, error

    with contextlib.suppress(FutureTimeoutError):
        for done in as_completed(list(begun), timeout_s):
            shard = begun.pop(done)
            failure = done.exception()
            yield shard, done.result() if failure is None else _shown(failure, shard)

    for shard in begun.values():
        why = f"shard {shard} did not answer within {timeout_s:g} s"
        yield shard, DeliveryUnknown(why, status=PutStatus.UNKNOWN_ERROR.value, shard=shard)


def _shown(error: BaseException, shard: int) -> RayMQError:
    return error if isinstance(error, RayMQError) else Bug(f"shard {shard}: {error!r}", shard=shard)


def first(answers: Iterable[tuple[int, Answer | RayMQError]]) -> Answer:
    """The first of the answers that `ask` yields.

    Raises: if no shard answers, an error that is not retriable (such as Rejected) if there is one, else the last error.
    """
    failed: RayMQError | None = None
    for _, answer in answers:
        if not isinstance(answer, RayMQError):
            return answer
        if failed is None or failed.retriable:
            failed = answer
    if failed is None:
        raise Bug("no shard was given to ask")
    raise failed
