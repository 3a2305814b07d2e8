"""Single messages that need not wait for each other: they are gathered while the append before them is under way.

Source: DefaultMessageStore#asyncPutMessage, RocketMQ 5.3.3, which appends each by itself under the put lock. Here
the unit of work is a batch, so single messages are gathered into one, without a linger.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pyarrow as pa

from raymq.store.base.clock import Clock
from raymq.store.base.errors import RayMQError, Rejected, Unavailable
from raymq.store.records.binary_columns import binary_array
from raymq.store.records.requests import AppendedRows, PutRequest
from raymq.store.records.small_batch import PUT_SCHEMA

#: bytes of one batch, about
BATCH_BYTES = 1 << 20
#: bytes that may wait; a put beyond them blocks
WAITING_BYTES_MAX = 16 << 20
#: bytes that a message costs besides its body, about
_OVERHEAD_BYTES = 100


@dataclass(eq=False, slots=True)
class _Batch:
    """Messages of one queue that are appended together."""

    target: tuple[str, int]
    born_ms: int
    bodies: list[bytes] = field(default_factory=list)
    tags: list[str | None] = field(default_factory=list)
    properties: list[bytes | None] = field(default_factory=list)
    nbytes: int = 0
    done: threading.Event = field(default_factory=threading.Event)
    appended: AppendedRows | None = None
    error: Exception | None = None
    #: one message each, when one of the batch was refused: only that message fails
    singles: list[_Batch] = field(default_factory=list)

    def split(self) -> list[_Batch]:
        """Each row by itself."""
        for body, tag, text in zip(self.bodies, self.tags, self.properties, strict=True):
            self.singles.append(_Batch(self.target, self.born_ms, [body], [tag], [text]))
        return self.singles

    def request(self) -> PutRequest:
        """The messages as columns."""
        count = len(self.bodies)
        columns = pa.RecordBatch.from_arrays(
            [
                binary_array(self.bodies),
                pa.array(self.tags, pa.string()),
                pa.array(self.properties, pa.binary()),
                pa.array([self.born_ms] * count, pa.int64()),
            ],
            schema=PUT_SCHEMA,
        )
        return PutRequest(*self.target, columns, None, 0, 0, "quorum")


@dataclass(eq=False, slots=True)
class AsyncAppend:
    """The future answer to one message."""

    _batch: _Batch
    _row: int

    def done(self) -> bool:
        """Whether `result` returns or raises at once."""
        return self._batch.done.is_set()

    def result(self, timeout_s: float | None = None) -> int:
        """The message's queue offset, when the store's promise for it is kept.

        Raises: TimeoutError when that is not known yet; the errors of `EmbeddedStore.put`.
        """
        batch, row = self._batch, self._row
        if not batch.done.wait(timeout_s):
            raise TimeoutError(f"the message is not answered within {timeout_s} s; ask again")
        if batch.singles:
            batch, row = batch.singles[row], 0
        if batch.error is not None:
            raise batch.error
        if batch.appended is None:
            raise Unavailable("the store was closed before the message was stored", field="store")
        return batch.appended.first_offset + row


class AsyncPut:
    """Gathers single messages of one store into batches. Callers: any thread; order holds for each thread and queue."""

    def __init__(
        self,
        append: Callable[[PutRequest], AppendedRows],
        wait: Callable[[AppendedRows], AppendedRows],
        clock: Clock,
    ) -> None:
        """Args: `append`, `wait`: those of the store."""
        self._append_rows = append
        self._wait = wait
        self._clock = clock
        self._changed = threading.Condition()
        self._open: dict[tuple[str, int], _Batch] = {}
        self._full: deque[_Batch] = deque()
        self._waiting_bytes = 0
        self._idle = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="raymq-async-put", daemon=True)
        self._thread.start()

    def put(
        self,
        topic: str,
        queue_id: int,
        body: bytes,
        *,
        tag: str | None = None,
        properties: bytes | None = None,
    ) -> AsyncAppend:
        """Hand a message over. Args: `properties`, encoded (store/records/properties.py).

        Blocks while 16 MiB wait. Raises: Unavailable after `close`.
        """
        target = (topic, queue_id)
        nbytes = len(body) + _OVERHEAD_BYTES
        with self._changed:
            while self._waiting_bytes > WAITING_BYTES_MAX and not self._closing:
                self._changed.wait()
            if self._closing:
                raise Unavailable("no more messages are taken: it is closed", field="store")

            batch = self._open.get(target)
            if batch is None:
                batch = self._open[target] = _Batch(target, self._clock.now_ms())
            row = len(batch.bodies)
            batch.bodies.append(body)
            batch.tags.append(tag)
            batch.properties.append(properties)
            batch.nbytes += nbytes
            self._waiting_bytes += nbytes

            if batch.nbytes >= BATCH_BYTES:
                self._full.append(self._open.pop(target))
            if self._idle:
                self._idle = False
                self._changed.notify_all()
        return AsyncAppend(batch, row)

    def _run(self) -> None:
        """Append and flush gathered batches until `close`: the body of the thread."""
        while True:
            with self._changed:
                while not (self._full or self._open) and not self._closing:
                    self._idle = True
                    self._changed.wait()
                taken = [*self._full, *self._open.values()]
                self._full.clear()
                self._open.clear()
                if not taken:
                    return

            for batch in taken:
                self._append(batch)
            # One flush serves them all.
            for batch in taken:
                self._await_promise(batch)

            with self._changed:
                self._waiting_bytes -= sum(batch.nbytes for batch in taken)
                self._changed.notify_all()

    def _append(self, batch: _Batch) -> None:
        """Append a batch. Its error is kept for the callers of `AsyncAppend.result`."""
        try:
            batch.appended = self._append_rows(batch.request())
        except (RayMQError, OSError) as error:
            batch.error = error
            if isinstance(error, Rejected):
                self._append_each(batch)
        except Exception as error:
            # A value that its column cannot hold. Without an error its caller would wait for ever.
            batch.error = Rejected(
                f"a message cannot be stored as it is: {error}",
                field="batch",
                limit="bytes and text",
            )
            self._append_each(batch)

    def _append_each(self, batch: _Batch) -> None:
        """Store the messages of a refused batch one by one, so that only the wrong ones are refused."""
        if len(batch.bodies) > 1:
            for one in batch.split():
                self._append(one)

    def _await_promise(self, batch: _Batch) -> None:
        """Wait for the promise of a batch, and answer its callers."""
        for one in batch.singles:
            self._await_promise(one)
        try:
            if batch.appended is not None:
                self._wait(batch.appended)
        except Exception as error:
            batch.error = error
        finally:
            batch.done.set()

    def close(self) -> None:
        """Store the queued messages, and end."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
