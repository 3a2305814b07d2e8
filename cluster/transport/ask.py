"""Asks several shards at the same time, so that a silent shard delays only its own answer."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from raymq.store.base.clock import Clock
from raymq.store.base.errors import Bug, DeliveryUnknown, RayMQError, Rejected, Unavailable
from raymq.store.base.status import PutStatus

Answer = TypeVar("Answer")

#: fields of the error by which a server says that it is another shard
_IDENTITY = ("cluster_id", "shard")


def moved(error: RayMQError) -> bool:
    """Whether the shard no longer answers at its last known endpoint: nothing listens there, or another shard does."""
    stranger = isinstance(error, Rejected) and error.fields.get("field") in _IDENTITY
    return stranger or isinstance(error, Unavailable)


def ask(
    shards: Iterable[int], call: Callable[[int], Answer], *, timeout_s: float, in_turn: bool = False
) -> Iterator[tuple[int, Answer | RayMQError]]:
    """Call `call(shard)` for all shards at once. Yields: (shard, answer or error), the fastest first.

    A shard without an answer after `timeout_s` yields DeliveryUnknown. Its thread ends by the timeout of its own call,
    so `call` needs one. That thread may still run when the caller leaves Ray, and a process that uses Ray while leaving
    it dies. So `call` must not use Ray: calls by Ray are made `in_turn`.
    """
    if in_turn:
        for shard in shards:
            try:
                yield shard, call(shard)
            except RayMQError as error:
                yield shard, error
        return
    answers: queue.SimpleQueue[tuple[int, Answer | RayMQError]] = queue.SimpleQueue()

    def run(shard: int) -> None:
        try:
            answers.put((shard, call(shard)))
        except RayMQError as error:
            answers.put((shard, error))
        except Exception as error:
            answers.put((shard, Bug(f"shard {shard}: {error!r}", shard=shard)))

    clock = Clock()
    deadline_s = clock.monotonic() + timeout_s
    silent = list(shards)

    for shard in silent:
        threading.Thread(target=run, args=(shard,), name=f"raymq-ask-{shard}", daemon=True).start()

    while silent:
        try:
            shard, answer = answers.get(timeout=max(0.0, deadline_s - clock.monotonic()))
        except queue.Empty:
            break
        silent.remove(shard)
        yield shard, answer

    for shard in silent:
        why = f"shard {shard} did not answer within {timeout_s:g} s"
        yield shard, DeliveryUnknown(why, status=PutStatus.UNKNOWN_ERROR.value, shard=shard)


def first(
    shards: Iterable[int], call: Callable[[int], Answer], *, timeout_s: float, in_turn: bool = False
) -> tuple[int, Answer]:
    """The first shard that answers, and its answer. See `ask`.

    Raises: if no shard answers, an error that is not retriable (such as Rejected) if there is one, else the last error.
    """
    failed: RayMQError | None = None
    for shard, answer in ask(shards, call, timeout_s=timeout_s, in_turn=in_turn):
        if not isinstance(answer, RayMQError):
            return shard, answer
        if failed is None or failed.retriable:
            failed = answer
    if failed is None:
        raise Bug("no shard was given to ask")
    raise failed
