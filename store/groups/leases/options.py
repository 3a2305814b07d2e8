"""What a group of workers may set, with defaults and limits."""

from __future__ import annotations

from dataclasses import dataclass

from raymq.store.base.errors import Rejected

#: a message that is returned with a longer delay is moved to the group's retry topic
DELAY_IN_PLACE_MS_MAX = 60_000
#: offsets that one request may lease
LEASE_OFFSETS_MAX = 65_536
#: messages that one step copies to the dead letters or to the retry topic, at most
COPIES_MAX = 64
#: the longest time that a record can say
MS_MAX = (1 << 32) - 2
#: limits of what workers ask for: shortest and longest lease, in ms
LEASE_MS = (1_000, 3_600_000)
MAX_LEASE_MS_MAX = 7 * 86_400_000
IN_FLIGHT_MAX = 1_000_000
ATTEMPTS_MAX = 1_000
#: how many delays a group may have, and the longest one
BACKOFF_MAX = 100
DELAY_MS_MAX = 7_200_000
#: dead letters a minute
DEAD_RATE_MAX = 1_000_000


@dataclass(frozen=True)
class LeaseOptions:
    """How a group leases messages. Times in ms."""

    #: without renewal, others may get a message after so long
    lease_ms: int = 60_000
    #: a lease is not renewed beyond so long after its delivery
    max_lease_ms: int = 43_200_000
    #: leased and not settled on this shard. At the bound no further messages are leased for the first time
    max_in_flight: int = 10_000
    #: offsets from the low mark to the next one, of each queue
    window: int = 1_000_000
    #: deliveries of a message, before it is a dead letter; None: no limit
    max_attempts: int | None = 16
    #: delay of a message that is delivered again, by the number of its attempts; the last one counts for all more
    backoff_ms: tuple[int, ...] = (1_000, 2_000, 5_000, 10_000, 30_000, 60_000)
    #: key or queue: one lease at a time, in the order of offsets; empty: no order
    order: str = ""
    #: False: a message after its last attempt is dropped, and counted
    has_dead_letters: bool = True
    #: messages that may die within a minute on this shard, by the log's store time. After more the group is paused;
    #: None: no limit
    dead_rate: int | None = 1_000

    def __post_init__(self) -> None:
        """Raises: Rejected for values that no record could say."""
        for name in ("lease_ms", "max_lease_ms"):
            check_range(name, getattr(self, name), 1, MS_MAX)
        check_range("delays in backoff_ms", len(self.backoff_ms), 1, MS_MAX)
        for delay_ms in self.backoff_ms:
            check_range("backoff_ms", delay_ms, 0, MS_MAX)

    def backoff_of(self, attempts: int) -> int:
        """The delay of a message after so many attempts, at least one."""
        return self.backoff_ms[min(max(attempts, 1), len(self.backoff_ms)) - 1]


def check_range(field: str, found: int, least: int, most: int) -> None:
    """Raises: Rejected unless a number is in its range."""
    if not least <= found <= most:
        raise Rejected(
            f"{field} is between {least} and {most}, not {found}",
            field=field,
            limit=[least, most],
            found=found,
        )
