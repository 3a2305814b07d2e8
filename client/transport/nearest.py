"""Reads of a shard from its nearest replica that answers: one on this machine, else any follower, else the leader.

A reader never goes back, whichever replicas it reads. Every fetch carries the newest epoch that the reader has seen,
and its offsets. A replica that is not that far refuses, and so does one whose copy is not whole. The stream then goes
to the next replica without an error. Only the leader's errors reach the reader, so the leader has the last word about
what a queue holds.

A replica that was left is tried again after a pause, which is doubled with each failure.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Collection
from typing import NamedTuple

from raymq.store.base.clock import Clock
from raymq.store.base.errors import RayMQError, ReplicaBehind, Unavailable
from raymq.store.records.requests import FetchRequest, FetchSlice

from .connection import FetchStream
from .locality import is_local
from .routes import REPLICAS_AGE_S, Routes

#: longest wait of one fetch at a follower
REPLICA_WAIT_MS = 500
#: a replica whose answer is late by this is left
REPLICA_SILENT_MS = 1_000
#: how long replicas that are behind the reader are asked again, and how often
BEHIND_MS = 1_000
BEHIND_PAUSE_MS = 50
#: how long a follower may take to check a record
CHECK_TIMEOUT_S = 10.0
#: from the failure of a replica to its next try: doubled with each failure
RETRY_MS = 1_000
RETRY_MS_MAX = 60_000


class Replica(NamedTuple):
    """A replica that may be read now."""

    id: int
    endpoint: str


class Retry(NamedTuple):
    """When a replica may be tried again, and the pause before that."""

    due_ms: int
    pause_ms: int


class NearestReplicas:
    """The replicas of one shard as one reader sees them, over all its streams. Callers: one thread."""

    def __init__(self, routes: Routes, shard: int) -> None:
        self.routes = routes
        self.shard = shard
        self.clock = Clock()
        #: the newest epoch of an answer
        self.seen_epoch = 0
        #: replica that was left -> its next try
        self._retries: dict[int, Retry] = {}
        #: replica -> a number that orders those at the same distance: readers spread over them
        self._chances: dict[int, float] = {}
        #: the follower that answered last; None: the leader did, or none yet
        self._answered: Replica | None = None

    def open(self) -> NearestStream:
        """A stream for reads, which connects with its first fetch."""
        return NearestStream(self)

    def nearest(self, left: Collection[int] = ()) -> Replica | None:
        """The replica to read now, other than those that were `left` already.

        None: the leader, because it is nearer than the followers, or because none of them may be tried.
        """
        leader = self.routes.route(self.shard).endpoint
        is_leader_local, now_ms = is_local(leader), self.clock.monotonic_ms()
        followers = [
            (not is_local(endpoint), self._chances.setdefault(replica, random.random()), replica)
            for replica, endpoint in self._endpoints().items()
            if endpoint != leader and replica not in left and self._is_due(replica, now_ms)
        ]
        if not followers:
            return None
        is_far, _, replica = min(followers)
        if is_far and is_leader_local:
            return None
        return Replica(replica, self._endpoints()[replica])

    def _endpoints(self) -> dict[int, str]:
        """Replica -> its last known endpoint."""
        routes = self.routes
        if len(routes.replicas_of(self.shard)) < routes.replicas or self._retries:
            # A replica that failed may have another endpoint now.
            routes.learn_replicas(REPLICAS_AGE_S)
        return routes.replicas_of(self.shard)

    def _is_due(self, replica: int, now_ms: int) -> bool:
        retry = self._retries.get(replica)
        return retry is None or now_ms >= retry.due_ms

    def note_answer(self, replica: Replica | None, found: list[FetchSlice]) -> None:
        """Note an answer of a replica. None: of the leader."""
        self._answered = replica
        self.seen_epoch = max([self.seen_epoch, *(part.epoch for part in found)])
        if replica is not None:
            self._retries.pop(replica.id, None)

    def note_failure(self, replica: int) -> None:
        """Try a replica again later."""
        before = self._retries.get(replica)
        pause_ms = RETRY_MS if before is None else min(2 * before.pause_ms, RETRY_MS_MAX)
        self._retries[replica] = Retry(self.clock.monotonic_ms() + pause_ms, pause_ms)

    def reject_answer(self, topic: str, queue_id: int, offset: int) -> bool:
        """Leave the follower that answered last, because this message arrived damaged from there.

        The follower checks its copy, and mends what is damaged. Returns: whether a follower answered last.
        """
        answered = self._answered
        if answered is None:
            return False
        self.note_failure(answered.id)
        arguments = {"topic": topic, "queue_id": queue_id, "offset": offset}
        # Its answer changes nothing here: another replica is read now.
        self.routes.begin(self.shard, answered.endpoint, "check_record", arguments, CHECK_TIMEOUT_S)
        return True


class NearestStream:
    """A fetch stream that changes the replica by itself. Any thread may call `abort`, only the owner the rest."""

    def __init__(self, replicas: NearestReplicas) -> None:
        self._replicas = replicas
        #: guards `_stream`: a closed stream must not be aborted
        self._lock = threading.Lock()
        self._stream: FetchStream | None = None
        #: the replica that `_stream` reads; None: the leader
        self._replica: int | None = None
        #: since when the replicas have been behind the reader; None: the last fetch was answered
        self._behind_since_ms: int | None = None
        self._aborted = threading.Event()

    def fetch(self, request: FetchRequest) -> list[FetchSlice]:
        """Read queues from the nearest replica that answers. Raises: the leader's errors; Unavailable after `abort`."""
        replicas = self._replicas
        left: set[int] = set()
        while True:
            nearest = replicas.nearest(left)
            wanted = request._replace(seen_epoch=replicas.seen_epoch)
            try:
                if nearest is None:
                    found = self._stream_to(None).fetch(wanted)
                else:
                    wait_ms = min(request.wait_ms, REPLICA_WAIT_MS)
                    found = self._stream_to(nearest).fetch(wanted._replace(wait_ms=wait_ms))
            except RayMQError as error:
                self._check_open()
                if nearest is None:
                    raise
                if not self._awaits(error):
                    replicas.note_failure(nearest.id)
                    left.add(nearest.id)
                    self._use(None)
                continue

            self._behind_since_ms = None
            replicas.note_answer(nearest, found)
            return found

    def _stream_to(self, nearest: Replica | None) -> FetchStream:
        """The stream to a replica, None: to the leader. Raises: RayMQError."""
        replica = None if nearest is None else nearest.id
        stream = self._stream
        if stream is None or self._replica != replica:
            self._use(None)
            self._replica = replica
            routes, shard = self._replicas.routes, self._replicas.shard
            if nearest is None:
                stream = routes.fetch_stream(shard)
            else:
                stream = routes.replica_stream(shard, nearest.endpoint, REPLICA_SILENT_MS)
            self._use(stream)
        return stream

    def _use(self, stream: FetchStream | None) -> None:
        """Read this stream from now on, and close the one before. Raises: Unavailable after `abort`."""
        with self._lock:
            before, self._stream = self._stream, stream
        if before is not None:
            before.close()
        self._check_open()

    def _awaits(self, error: RayMQError) -> bool:
        """Wait for a moment if the replica is behind the reader. Returns: whether to ask it again."""
        if not isinstance(error, ReplicaBehind):
            return False
        now_ms = self._replicas.clock.monotonic_ms()
        if self._behind_since_ms is None:
            self._behind_since_ms = now_ms
        if now_ms - self._behind_since_ms >= BEHIND_MS:
            return False
        self._aborted.wait(BEHIND_PAUSE_MS / 1000)
        return True

    def _check_open(self) -> None:
        if self._aborted.is_set():
            shard = self._replicas.shard
            raise Unavailable(f"shard {shard}: the stream was closed", shard=shard)

    def abort(self) -> None:
        """Break the stream: a thread that reads gets Unavailable."""
        self._aborted.set()
        with self._lock:
            if self._stream is not None:
                self._stream.abort()

    def close(self) -> None:
        """End the stream. It must not be used afterwards."""
        with self._lock:
            stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
