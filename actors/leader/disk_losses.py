"""Writes into the log that a majority of the replicas may have lost confirmed messages.

Their disks were lost or damaged, or the power failed with flush=async. Such a shard elects a leader again once all
replicas answer (rule R14 of docs/design.md), and goes on. Without a word in its log nothing would say what may be gone.
A leader also writes down which replicas are complete. One that is not complete, and stands there, may have lost what it
held. One that does not stand there is new, and held nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from raymq.actors.shared.control_block import Leadership
from raymq.actors.supervise.replica_parts import ReplicaParts
from raymq.replication.quorum import can_fail_over, may_lack_confirmed
from raymq.store.base.errors import Bug, RayMQError
from raymq.store.put.inner_message import ServiceProgress
from raymq.store.records.requests import AppendedRows
from raymq.store.state.shard_state import COMPLETE_REPLICAS, UNCLEAN_RECOVERIES


class DiskLosses:
    """What one leader writes down of its replicas. Callers: the maintenance loop."""

    def __init__(
        self,
        parts: ReplicaParts,
        led: Leadership | None,
        publish: Callable[[AppendedRows], None],
        *,
        led_from_nothing: bool,
    ) -> None:
        """Args: `led`, `led_from_nothing`: as of `Leader`. `publish`: reports appended records to the satellites."""
        self._store = parts.store
        self._elections = parts.elections
        self._control = parts.supervisor.control
        self._shard = parts.options.identity["shard"]
        self._members = parts.options.all_members
        self._led = led
        self._led_from_nothing = led_from_nothing
        self._publish = publish
        #: wall clock
        self._began_ms = parts.clock.now_ms()
        self._lost = self._find_lost()

    def step(self) -> None:
        """Write what is not in the log yet. What cannot be appended now is tried again by the next call."""
        if self._led is None or not can_fail_over(len(self._members)):
            return

        try:
            self._write_lost()
            new = self._find_new()
            if new:
                self._write(COMPLETE_REPLICAS, new)
        except Bug:
            raise
        except (RayMQError, OSError):
            # The disk is full, for example. The next call tries again.
            return

    def _write_lost(self) -> None:
        """Write which replicas were lost, once."""
        if not self._lost:
            return
        facts = {
            "at_ms": self._began_ms,
            "shard": self._shard,
            "lost": self._lost,
            "cause": "these replicas were not complete: their disks were lost or damaged, or the power failed "
            "with flush=async",
        }
        # The time is the key, as of `raymq shard recover --unclean`. A second try writes the same.
        self._write(UNCLEAN_RECOVERIES, {str(self._began_ms): facts})
        # The value None removes a key: an election before these replicas are complete again is not another loss.
        self._write(COMPLETE_REPLICAS, dict.fromkeys(map(str, self._lost)))
        self._lost = []

    def _find_lost(self) -> list[int]:
        """The replicas that had lost what they held when this one was elected, if they may have been a majority."""
        elections = self._elections
        incomplete = sorted(elections.incomplete_voters)
        known = self._store.state.progress.get(COMPLETE_REPLICAS, {})
        held = {replica: known[str(replica)] for replica in incomplete if str(replica) in known}
        lost = [
            replica
            for replica, generation in held.items()
            if generation == elections.generation(replica)
        ]
        if lost:
            # What the replicas before the replaced ones held is gone, too. Alone that was an operator's decision.
            lost = sorted(held)
        if self._led_from_nothing:
            # Without a log none knows which replicas held one.
            lost = incomplete
        return lost if may_lack_confirmed(len(self._members), len(lost)) else []

    def _find_new(self) -> dict[str, int]:
        """The replicas that are complete, with their generations, as far as the log does not say so."""
        elections = self._elections
        epoch = 0 if self._led is None else self._led.epoch
        complete = [elections.me.id] if elections.is_complete else []
        for replica in self._members:
            found = self._control.followers[replica].read()
            if found.epoch == epoch and found.is_complete:
                complete.append(replica)
        known = self._store.state.progress.get(COMPLETE_REPLICAS, {})
        generations = {str(replica): elections.generation(replica) for replica in complete}
        return {name: each for name, each in generations.items() if known.get(name) != each}

    def _write(self, service: str, values: Mapping[str, object]) -> None:
        store = self._store
        store.put_inner([], progress=ServiceProgress(service, dict(values)))
        # Not awaited: as long as the others copy the log, no majority confirms anything.
        self._publish(AppendedRows.up_to(store.log.end))
