"""Mends damaged bytes of this replica's log with those of the other replicas of the shard.

A read that meets damage asks at once, for ASK_S at most (`LogMender.mend`). The thread of `run` mends what the scrub
and earlier reads have found, and replaces the damaged files.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from raymq.actors.shared.failures import ActiveFailures
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Corrupt, RayMQError, ReplicaBehind
from raymq.store.log.commit_log import CommitLog
from raymq.store.log.mending.fitting import SoundBytes
from raymq.store.log.mending.log_mender import LogMender
from raymq.store.log.mending.mended_copy import delete_unfinished
from raymq.store.log.mending.sound_bytes import ANSWER_BYTES_MAX
from raymq.store.log.scrub import Scrub

from .election_peers import PeerCalls

logger = logging.getLogger("raymq.commit_log")

#: how long the other replicas are asked for one unit
ASK_S = 2.0
#: how long one call may take
CALL_S = 1.0
#: from one question to a replica that has not confirmed the bytes to the next one
BEHIND_MS = 100
#: from one try to mend all known damage to the next one
RETRY_S = 30.0


class LogRepair:
    """The repair of one replica's log. Callers: any thread; `run` has a thread of its own."""

    def __init__(
        self,
        log: CommitLog,
        scrub: Scrub,
        replicas: Callable[[], Sequence[int]],
        connect: Callable[[int], PeerCalls],
        *,
        met: Callable[[], Sequence[int]] = list,
        end_file: Callable[[], None] = lambda: None,
        failures: ActiveFailures,
        clock: Clock,
    ) -> None:
        """Args: `replicas`: the others of the shard, in the order to ask. `connect`: makes the calls of one.

        `met`: physical offsets of damage that other processes of this replica met. `end_file`: ends the file that is
        written, if this replica writes it.
        """
        self._log = log
        self._scrub = scrub
        self._replicas = replicas
        self._connect = connect
        self._met = met
        self._end_file = end_file
        self._failures = failures
        self._clock = clock

        self._wake = threading.Event()
        self._stopping: Callable[[], bool] = lambda: False
        #: damage that was met by threads which cannot wait
        self._asked_for: set[int] = set()
        #: replica -> why it gave no bytes when it was asked last
        self._refusals: dict[int, str] = {}

        self.mender = LogMender(
            log,
            self._ask,
            on_patched=self._wake.set,
            on_replaced=self._forget,
            is_stopping=lambda: self._stopping(),
        )
        with contextlib.suppress(OSError, RayMQError):
            delete_unfinished(log)
        log.reads.mend = self.mender.mend
        log.reads.mend_later = self._mend_later

    # --- the loop ---------------------------------------------------------------------------------

    def run(self, stopping: Callable[[], bool]) -> None:
        """Mend until `stopping` returns True: the body of a thread."""
        self._stopping = stopping
        while not stopping():
            try:
                self.step()
            except Exception:
                # Any error: the next try may succeed, and nothing but the repair depends on it.
                logger.exception("repair")
            self._wake.wait(RETRY_S)
            self._wake.clear()

    def wake(self) -> None:
        """Try at once, or check `stopping`."""
        self._wake.set()

    def step(self) -> None:
        """Mend the known damage, replace files, and note what is left."""
        damaged = [at for at in self._damaged_places() if not self.mender.mend(at, again=True)]
        if any(
            file.start <= self._log.end < file.start + file.size
            for file in self.mender.patched_files
        ):
            try:
                self._end_file()
            except (OSError, RayMQError) as error:
                logger.info("the damaged file is not ended yet: %s", error)
        self.mender.replace_files()

        cause = self._what_is_left(damaged)
        if cause is None:
            self._failures.clear("repair")
        else:
            self._failures.note("repair", Corrupt(cause))

    def _mend_later(self, offset: int) -> None:
        self._asked_for.add(offset)
        self._wake.set()

    def _damaged_places(self) -> list[int]:
        """Physical offsets at which the scrub, a read, dispatch or Replication met damage."""
        asked_for, self._asked_for = self._asked_for, set()
        found = {
            *asked_for,
            *self._met(),
            *(int(fault.fields["offset"]) for fault in self._scrub.faults),
        }
        return sorted(
            at for at in found | set(self._log.reads.skipped_damage) if at >= self._log.start
        )

    def _what_is_left(self, damaged: list[int]) -> str | None:
        """What of the log is damaged and not repaired, for status; None: nothing."""
        parts = []
        broken = [at for at in damaged if self.mender.is_chain_broken(at)]
        if broken:
            parts.append(
                f"the chain of this replica is damaged at {_shown(broken)}, so that nothing proves which bytes are "
                "right; `raymq store verify` says more"
            )

        damaged = [at for at in damaged if at not in broken]
        if damaged:
            refusals = "; ".join(
                f"replica {each}: {why}" for each, why in sorted(self._refusals.items())
            )
            parts.append(
                f"the log is damaged at {_shown(damaged)}, and no other replica has given sound bytes"
                f"{f' ({refusals})' if refusals else ''}"
            )

        if self.mender.last_error is not None:
            parts.append(self.mender.last_error)
        elif self.mender.patched_files:
            names = ", ".join(file.path.name for file in self.mender.patched_files)
            parts.append(f"damaged bytes of {names} are read from memory until the file is full")
        return "; ".join(parts) or None

    def _forget(self, is_sound: Callable[[int], bool]) -> None:
        """A file was replaced: its damage is over."""
        self._log.reads.forget_damage(is_sound)
        self._scrub.forget(is_sound)

    def status(self) -> dict[str, Any]:
        """For status displays."""
        return self.mender.status()

    # --- the other replicas -----------------------------------------------------------------------

    def _ask(self, start: int, stop: int) -> Iterator[SoundBytes]:
        """Log bytes [start, stop) of each other replica that has them."""
        deadline_s = self._clock.monotonic() + ASK_S
        replicas = list(self._replicas())

        while replicas and self._clock.monotonic() < deadline_s:
            behind: list[int] = []
            for replica in replicas:
                try:
                    found = self._ask_one(replica, start, stop, deadline_s)
                except Exception as error:
                    # Whatever it is, the reader gets the error of its own bytes.
                    self._note_refusal(replica, error)
                    if _is_behind(error):
                        behind.append(replica)
                    continue
                self._refusals.pop(replica, None)
                yield found

            # A follower learns the confirmed end a little later than the leader.
            replicas = behind
            if behind:
                self._clock.sleep_ms(BEHIND_MS)

    def _note_refusal(self, replica: int, error: Exception) -> None:
        expected = isinstance(error, (RayMQError, OSError))
        level = logging.INFO if expected else logging.ERROR
        logger.log(level, "replica %d: %s", replica, error, exc_info=not expected)
        self._refusals[replica] = str(error)

    def _ask_one(self, replica: int, start: int, stop: int, deadline_s: float) -> SoundBytes:
        """Log bytes [start, stop) of one replica. Raises: RayMQError, OSError; Corrupt if it is damaged there."""
        calls = self._connect(replica)
        try:
            parts = []
            for at in range(start, stop, ANSWER_BYTES_MAX):
                timeout_s = min(CALL_S, max(0.1, deadline_s - self._clock.monotonic()))
                upto = min(at + ANSWER_BYTES_MAX, stop)
                parts.append(calls.log_units(at, upto, timeout_s))
        finally:
            with contextlib.suppress(RayMQError, OSError):
                calls.close()
        # A unit that lies in two parts came with both.
        units = sorted({unit for part in parts for unit in part.units})
        return SoundBytes(start, b"".join(part.data for part in parts), units)


def _is_behind(error: Exception) -> bool:
    """Whether a replica may have the bytes, and has not confirmed them yet."""
    return isinstance(error, ReplicaBehind)


def _shown(places: list[int]) -> str:
    """Some physical offsets, for a text."""
    return ", ".join(map(str, places[:3])) + (
        f" and {len(places) - 3} more places" * (len(places) > 3)
    )
