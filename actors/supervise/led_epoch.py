"""The epoch that one replica leads: begun in its log, shown to Replication, and over when the elections say so."""

from __future__ import annotations

from collections.abc import Callable

from raymq.actors.shared.control_block import Leadership
from raymq.actors.shared.failures import ActiveFailures
from raymq.replication.election_events import EpochBegun
from raymq.store.base.clock import Clock
from raymq.store.base.errors import StorageFull, Unavailable
from raymq.store.base.files import SyncFailed
from raymq.store.engine.message_store import MessageStore

from .elections import Elections
from .supervisor import Supervisor

#: between two tries to begin an epoch
LEAD_RETRY_MS = 5_000


class LedEpoch:
    """The epoch that one replica leads, if any. Callers: the start, then the ack loop; any thread reads."""

    def __init__(
        self,
        store: MessageStore,
        elections: Elections,
        supervisor: Supervisor,
        failures: ActiveFailures,
        *,
        clock: Clock,
        note_leadership: Callable[[int], None] | None,
    ) -> None:
        """Args: `note_leadership`: as of `ReplicaOptions`."""
        #: the epoch that this replica leads; None: it follows
        self.led: Leadership | None = None
        #: the log was empty when that epoch began
        self.led_from_nothing = False
        self._store = store
        self._elections = elections
        self._supervisor = supervisor
        self._failures = failures
        self._clock = clock
        self._note_leadership = note_leadership
        self._next_try_ms = 0

    @property
    def may_try(self) -> bool:
        """Whether an epoch may be begun now: not so soon after the disk refused its record."""
        return self._clock.monotonic_ms() >= self._next_try_ms

    def begin(self) -> None:
        """Begin the epoch that this replica was elected to lead: set `led`, unless that has to be tried again."""
        epoch = self._elections.elected_epoch
        if epoch is None:
            return

        log = self._store.log
        is_empty = log.is_empty
        try:
            begun = self._store.lead(epoch)
        except (StorageFull, Unavailable, OSError) as error:
            if isinstance(error, SyncFailed):
                raise
            if self._elections.elected_epoch != epoch:
                # Another epoch has begun meanwhile: the next one may begin at once.
                self.forget()
                return
            self._failures.note("lead", error)
            self._next_try_ms = self._clock.monotonic_ms() + LEAD_RETRY_MS
            return

        self._elections.step(EpochBegun(epoch, begun.end_offset))
        self.led = Leadership(
            epoch, begun.end_offset, self._elections.me.incarnation, log.confirmed
        )
        self.led_from_nothing = is_empty
        self._failures.clear("lead")

    def forget(self) -> None:
        """No epoch waits to begin."""
        self._next_try_ms = 0
        self._failures.clear("lead")

    def end(self) -> None:
        """Lead no more: Replication ends the streams of this epoch."""
        self.led = None
        self.publish()

    def publish(self) -> None:
        """Let Replication serve the epoch that is led, and take puts, unless that epoch is over already."""
        self._supervisor.publish_leadership(self.led)
        if self.led is None:
            return
        if self._elections.admit_puts(self.led.epoch) and self._note_leadership is not None:
            self._note_leadership(self.led.epoch)

    def is_over(self) -> bool:
        """Whether the epoch that this replica led is over, while its role may not have changed yet."""
        led = self.led
        return led is not None and self._elections.elected_epoch != led.epoch
