"""The state of a running store: bits that stop reads, puts or dispatch until they are cleared.

Source: RunningFlags, RocketMQ 5.3.3: the same bits, the same masks.
"""

from __future__ import annotations

import threading

from .errors import NotServing, StorageFull
from .status import PutStatus

#: reads are refused
NOT_READABLE = 1
#: an operator has stopped puts
NOT_WRITEABLE = 2
#: a consume queue could not be written
WRITE_LOGICS_QUEUE_ERROR = 4
#: an index file could not be written
WRITE_INDEX_FILE_ERROR = 8
#: the disk of the commit log is above `disk_space_warning_level_ratio`
DISK_FULL = 16
#: this replica does not lead at present: its epoch has not begun, or is over
FENCED = 32
#: the disk of the consume queues is above `disk_space_warning_level_ratio`
LOGIC_DISK_FULL = 64

NAMES = {
    NOT_READABLE: "NOT_READABLE",
    NOT_WRITEABLE: "NOT_WRITEABLE",
    WRITE_LOGICS_QUEUE_ERROR: "WRITE_LOGICS_QUEUE_ERROR",
    WRITE_INDEX_FILE_ERROR: "WRITE_INDEX_FILE_ERROR",
    DISK_FULL: "DISK_FULL",
    FENCED: "FENCED",
    LOGIC_DISK_FULL: "LOGIC_DISK_FULL",
}
#: any of these flags stops dispatch. With a full log disk, records of the log still go into the queues
BLOCKS_DISPATCH = (
    NOT_WRITEABLE | WRITE_LOGICS_QUEUE_ERROR | WRITE_INDEX_FILE_ERROR | LOGIC_DISK_FULL
)
#: any of these flags refuses puts, also those of the store's services. FENCED refuses state records, too
BLOCKS_PUTS = BLOCKS_DISPATCH | DISK_FULL | FENCED


class RunningFlags:
    """The bits of one store, none of which is set at its start. Callers: any thread."""

    def __init__(self) -> None:
        #: may be read without the lock; 0: all is well
        self.bits = 0
        self._lock = threading.Lock()

    def set(self, flag: int) -> bool:
        """Set a bit. Returns: whether it was not set before."""
        with self._lock:
            was, self.bits = self.bits, self.bits | flag
        return was != self.bits

    def clear(self, flag: int) -> bool:
        """Clear a bit. Returns: whether it was set."""
        with self._lock:
            was, self.bits = self.bits, self.bits & ~flag
        return was != self.bits

    @property
    def readable(self) -> bool:
        """Whether reads are answered."""
        return not self.bits & NOT_READABLE

    @property
    def writable(self) -> bool:
        """Whether puts are taken."""
        return not self.bits & BLOCKS_PUTS

    def names(self) -> list[str]:
        """The bits that are set, as text."""
        return [name for bit, name in NAMES.items() if self.bits & bit]

    def check_readable(self) -> None:
        """Check that reads are allowed. Raises: Unavailable if not."""
        if not self.readable:
            fault = "the store is not readable at present (NOT_READABLE)"
            raise NotServing(fault, field="flags", limit="readable")

    def check_writable(self) -> None:
        """Check that puts are allowed. Raises: StorageFull if only a full disk refuses them, otherwise Unavailable.

        Source: DefaultMessageStore#checkStoreStatus answers SERVICE_NOT_AVAILABLE for all of them.
        """
        blocking = self.bits & BLOCKS_PUTS
        if not blocking:
            return

        names = ", ".join(name for bit, name in NAMES.items() if blocking & bit)
        status = PutStatus.SERVICE_NOT_AVAILABLE.value
        if not blocking & ~(DISK_FULL | LOGIC_DISK_FULL):
            raise StorageFull(
                f"the disk is nearly full ({names}); nothing was stored, reads continue. Free some room, or shorten "
                "file_reserved_hours",
                field="disk",
                status=status,
            )

        fault = f"the store takes no puts at present ({names})"
        raise NotServing(fault, field="flags", status=status)
