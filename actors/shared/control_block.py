"""The control block: shared fields through which the processes of one replica report how far they are.

File `raymq/control`, one page, native byte order (it never leaves the machine). Every field is 8 bytes and has one
writing process. It is read and written only as an item of an aligned `memoryview.cast("q")`: one 8-byte move.
`struct.pack_into` was measured to show other processes torn values in 18-21 % of polls.

    field  writer     meaning
    0      CommitLog  magic
    1      CommitLog  version of this layout
    2      CommitLog  hash of the boot id: pids and monotonic times of another boot mean nothing
    3      CommitLog  incarnation of CommitLog
    4      CommitLog  state
    5      CommitLog  log generation: grows at every `begin`, so also after a truncation
    6, 7   CommitLog  pid, start time
    8      CommitLog  heartbeat, monotonic ms
    9      CommitLog  1: the heartbeat runs, even during recovery and on a slow disk; satellites kill a CommitLog whose
                      running heartbeat stops, see heartbeat.py
    10     CommitLog  epoch that this replica leads; 0: it follows
    11     CommitLog  end of the EPOCH record of that epoch. Replication confirms nothing below it
    12     CommitLog  incarnation under which the other replicas know this CommitLog process
    13     CommitLog  confirmed end when that epoch began. Replication calls nothing less confirmed
    16     CommitLog  appended end, packed with the log generation
    17-18             hints that save wakeups, see append_wakeups.py:
    17     CommitLog  1: an append has begun whose end is not in field 16 yet
    18     CommitLog  1: CommitLog polls the synced end; GroupCommit need not wake it
    19     CommitLog  1: appended bytes are in the transient pool until CommitRealTime has committed them
    32 + 32 * r       the record of role r:
      +0, +1  satellite  pid, start time
      +2      satellite  incarnation; written last, 0 while the fields beside it change
      +3      satellite  heartbeat, monotonic ms
      +4      satellite  sync started: end of the sync that runs or ran last, packed with the fencing token
      +5      satellite  position, packed with the fencing token: the synced end (flushers), the committed end
                         (CommitRealTime), or the end below which puts that wait for replicas are acknowledged
                         (Replication)
      +6      satellite  failure: errno of a failed sync, packed with the fencing token
      +7      satellite  count of syncs (commits, frames); each process adds to the count of its predecessor
      +8      satellite  count of syncs of more than half a second, like +7
      +16     CommitLog  grant: incarnation that may work, packed with the fencing token of its grant
      +17     CommitLog  incarnation granted last; stays when the grant is revoked
      +18     CommitLog  base: end that was synced (committed, acknowledged) when the grant was given
    160 + 8 * f       Replication  how far follower f is, see `FollowerRecord`:
      +0      epoch that Replication serves; 0 while the fields beside it change
      +1      end up to which the follower's log equals this one, durably
      +2      when the follower acknowledged last, monotonic ms
      +3      1: the follower is complete
      +4      end up to which the follower's log equals this one, durably or not
    224               CommitLog  grows with each change of the fields after it
    225 + o           CommitLog  1 + the value of option o of SATELLITE_OPTIONS, if it was changed while the store was
                                 open; 0: that with which the satellite was started
    384 + 32 * r      satellite  how long the syncs of role r took: counts and sum, see latency.py; written like +7

A packed field is (tag & 0x7FFF) << 48 | value, so one 8-byte store changes tag and value. The tag is a fencing token or
the log generation. A reader that expects another tag reads 0. Tag 0 is never given, so a zeroed page says nothing.

Fields +4 to +6 survive their writer. If both processes die, these fields hold an error that the kernel will not report
again. CommitLog clears them when it begins, while no grant is out. CommitRealTime's position counts under any token:
bytes once written into the files stay there, so committed = max(base, position). CommitLog clears counts and latencies
once, before its first grant: they are totals over all satellites of one CommitLog process.

Invariant: data, then field, then wakeup. If the wakeup is left out, the order of data and field is that of
memory_order.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, NamedTuple

from raymq.store.base.errors import broken
from raymq.store.base.files import Files
from raymq.store.config.promise import Flush

from .latency import FIELDS as LATENCY_FIELDS
from .latency import LatencyCounter
from .memory_order import shared_words
from .processes import INCARNATION_BITS, ProcessIdentity
from .ring import map_shared

FILE_BYTES = 4096
MAGIC = int.from_bytes(b"RayMQctl", "big")
VERSION = 3

COMMIT_LOG = "commit_log"
COMMIT_REAL_TIME = "commit_real_time"
FLUSH_REAL_TIME = "flush_real_time"


class Role(NamedTuple):
    """How the other processes of a replica treat the satellite of one role."""

    #: the end at which a granted process begins, a field of `Ends`
    base: str
    #: the processes that it wakes when its position has moved, in this order
    wakes: tuple[str, ...]


#: the order is the layout
ROLES: dict[str, Role] = {
    "group_commit": Role("synced", (COMMIT_LOG, "replication")),
    FLUSH_REAL_TIME: Role("synced", (COMMIT_LOG, "replication")),
    "replication": Role("replicated", (COMMIT_LOG,)),
    COMMIT_REAL_TIME: Role(
        "committed", ("group_commit", FLUSH_REAL_TIME, COMMIT_LOG, "replication")
    ),
}
#: flush mode -> the role that syncs
FLUSHERS: dict[Flush, str] = {"sync": "group_commit", "async": FLUSH_REAL_TIME}

_MAGIC, _VERSION, _BOOT, _INCARNATION, _STATE, _LOG_GENERATION = range(6)
_PID, _START_TIME, _HEARTBEAT, _HEARTBEAT_ON = range(6, 10)
_LED_EPOCH, _BEGUN_END, _PROCESS_INCARNATION, _LED_CONFIRMED = range(10, 14)
_APPENDED, _APPENDING, _COMMIT_LOG_POLLS, _POOLED = range(16, 20)
_FIRST_ROLE, _ROLE_FIELDS = 32, 32
_FIRST_FOLLOWER, _FOLLOWER_FIELDS = 160, 8
_OPTIONS_VERSION, _FIRST_OPTION = 224, 225
_FIRST_LATENCY = 384
_R_PID, _R_START_TIME, _R_INCARNATION, _R_HEARTBEAT, _R_SYNC_STARTED = range(5)
_R_POSITION, _R_FAILURE, _R_SYNCS, _R_SLOW_SYNCS = range(5, 9)
_R_GRANT, _R_LAST_GRANTED, _R_BASE = 16, 17, 18
_F_EPOCH, _F_DURABLE_END, _F_HEARD, _F_IS_COMPLETE, _F_MATCHED_END = range(5)
#: most replicas of a shard
REPLICAS_MAX = 8
#: the options that satellites follow while they work. The order is the layout
SATELLITE_OPTIONS = (
    "flush_commit_log_timed",
    "flush_interval_ms",
    "flush_least_pages",
    "flush_thorough_interval_ms",
    "commit_interval_ms",
    "commit_least_pages",
    "commit_thorough_interval_ms",
    "sync_flush_timeout_ms",
    "slave_timeout_ms",
    "catch_up_bytes_per_s",
)

#: of a packed field, whose value is an incarnation, an end or an errno
VALUE_BITS = INCARNATION_BITS
_VALUE_MASK = (1 << VALUE_BITS) - 1
_TAG_MASK = 0x7FFF


class State(IntEnum):
    """CommitLog's state."""

    #: not begun since the page was made
    NEW = 0
    RUNNING = 1
    #: closed in order: satellites exit
    STOPPED = 2
    #: a sync failed: no role is granted any more
    POISONED = 3


def shared_file(replica_dir: str, name: str) -> str:
    """Path of `control`, `ring-replication` or `<role>.lock` of a replica."""
    return f"{replica_dir}/raymq/{name}"


def pack_field(tag: int, value: int) -> int:
    """Pack tag and value into one field. Args: `value`: [0, 2**48)."""
    if not 0 <= value <= _VALUE_MASK:
        raise broken("value does not fit a packed field", value=value)
    return ((tag & _TAG_MASK) << VALUE_BITS) | value


class Tagged(NamedTuple):
    """The parts of a packed field."""

    #: a fencing token or a log generation
    tag: int
    value: int


def unpack_field(field: int) -> Tagged:
    """The inverse of `pack_field`."""
    return Tagged((field >> VALUE_BITS) & _TAG_MASK, field & _VALUE_MASK)


def value_of(field: int, tag: int) -> int:
    """The value, or 0 if the field has another tag (no tag is 0)."""
    has_tag = tag != 0 and (field >> VALUE_BITS) & _TAG_MASK == tag
    return field & _VALUE_MASK if has_tag else 0


def next_tag(tag: int) -> int:
    """The fencing token or log generation after this one: 1 to 0x7FFF, around."""
    return tag % _TAG_MASK + 1


class Registration(NamedTuple):
    """The process that registered for a role."""

    incarnation: int
    process: ProcessIdentity


def _field(index: int) -> Any:
    """A property that reads and writes one field of the `_words` of its class."""

    def read(self: Any) -> Any:
        return self._words[index]

    def write(self: Any, value: int) -> None:
        self._words[index] = value

    return property(read, write)


class RoleRecord:
    """The record of one role. The satellite calls `register` and `publish_...`, CommitLog the rest."""

    #: monotonic ms of the last heartbeat. Written by the satellite
    heartbeat_ms: int = _field(_R_HEARTBEAT)
    #: syncs of all processes of this role since `clear_counts`. Written by the satellite
    count: int = _field(_R_SYNCS)
    #: those of more than half a second. Written by the satellite
    slow_count: int = _field(_R_SLOW_SYNCS)
    #: the incarnation granted last, also after its grant was revoked. It has left the role before the next grant
    last_granted: int = _field(_R_LAST_GRANTED)
    #: the end at which a granted process starts: everything below was synced (committed, acknowledged) before its grant
    base: int = _field(_R_BASE)

    def __init__(self, words: memoryview, role: str) -> None:
        role_fields = list(ROLES).index(role) * _ROLE_FIELDS
        first = _FIRST_ROLE + role_fields
        first_latency = _FIRST_LATENCY + role_fields
        self._words = words[first : first + _ROLE_FIELDS]
        self._latency = words[first_latency : first_latency + LATENCY_FIELDS]
        #: how long the syncs of all processes took since `clear_counts`. The satellite adds
        self.sync_latency = LatencyCounter(self._latency)
        #: a key of ROLES
        self.role = role

    def register(self, registration: Registration, now_ms: int) -> None:
        """Register a process. Sync, position, failure and counts of its predecessor stay: CommitLog may need them."""
        words = self._words
        words[_R_INCARNATION] = 0
        words[_R_PID], words[_R_START_TIME] = registration.process
        words[_R_HEARTBEAT] = now_ms
        words[_R_INCARNATION] = registration.incarnation

    def publish_sync_started(self, token: int, end_offset: int) -> None:
        """Publish, before a sync, the end that its success will mean."""
        self._words[_R_SYNC_STARTED] = pack_field(token, end_offset)

    def publish_position(self, token: int, end_offset: int) -> None:
        """Publish a position: everything below is synced (committed, acknowledged)."""
        self._words[_R_POSITION] = pack_field(token, end_offset)

    def publish_failure(self, token: int, errno: int) -> None:
        """A sync failed."""
        self._words[_R_FAILURE] = pack_field(token, errno)

    def clear(self, base: int) -> None:
        """Clear the fields of dead processes. Callers: CommitLog, after acting on it, while the role is not granted."""
        for word in (_R_SYNC_STARTED, _R_POSITION, _R_FAILURE):
            self._words[word] = 0
        self.base = base

    def clear_counts(self) -> None:
        """Count from 0. Callers: CommitLog, once in its process, while the role is not granted."""
        self.count = self.slow_count = 0
        self.sync_latency.clear()

    def registration(self) -> Registration | None:
        """The registered process, or None without one, or while the record is being written."""
        words = self._words
        incarnation = words[_R_INCARNATION]
        process = ProcessIdentity(words[_R_PID], words[_R_START_TIME])
        if not incarnation or words[_R_INCARNATION] != incarnation:
            return None
        return Registration(incarnation, process)

    @property
    def sync_started(self) -> Tagged:
        """Fencing token and end."""
        return unpack_field(self._words[_R_SYNC_STARTED])

    @property
    def failure(self) -> Tagged:
        """Fencing token and errno; errno 0: none."""
        return unpack_field(self._words[_R_FAILURE])

    @property
    def committed(self) -> int:
        """Everything below is in the files, as far as CommitRealTime has published since `begin`. It never falls."""
        return max(self.base, self._words[_R_POSITION] & _VALUE_MASK)

    def position(self, token: int) -> int:
        """The end published under this fencing token, else 0."""
        return value_of(self._words[_R_POSITION], token)

    @property
    def grant(self) -> Tagged:
        """Fencing token, and the incarnation that may work; 0: none. One field: a reader never sees half a grant."""
        return unpack_field(self._words[_R_GRANT])

    @property
    def granted(self) -> bool:
        """Whether a process may work."""
        return bool(self._words[_R_GRANT] & _VALUE_MASK)

    def give_grant(self, incarnation: int, base: int) -> int:
        """Let this incarnation work from `base` on. Returns: the fencing token of the grant."""
        token = next_tag(self.grant.tag)
        self.base = base
        # First: the successor of a dead CommitLog must know which process may have been let in.
        self.last_granted = incarnation
        self._words[_R_GRANT] = pack_field(token, incarnation)
        return token

    def revoke_grant(self) -> None:
        """After this 8-byte store fields of the old token count as 0 and no process may work."""
        self._words[_R_GRANT] = pack_field(next_tag(self.grant.tag), 0)

    def release(self) -> None:
        """Release the memory."""
        self._latency.release()
        self._words.release()


class Leadership(NamedTuple):
    """The epoch that this replica leads."""

    epoch: int
    #: end of its EPOCH record
    begun_end: int
    #: incarnation of the CommitLog process that leads
    incarnation: int
    #: confirmed end when the epoch began, as far as this replica knew
    confirmed: int = 0


class FollowerProgress(NamedTuple):
    """How far a follower is, as Replication last reported."""

    epoch: int
    durable_end: int
    heard_ms: int
    is_complete: bool
    matched_end: int = 0


class FollowerRecord:
    """How far one follower is. Replication writes, CommitLog reads."""

    def __init__(self, words: memoryview, replica: int) -> None:
        first = _FIRST_FOLLOWER + replica * _FOLLOWER_FIELDS
        self._words = words[first : first + _FOLLOWER_FIELDS]

    def write(self, progress: FollowerProgress) -> None:
        """Replace the record."""
        words = self._words
        if words[_F_EPOCH] != progress.epoch:
            words[_F_EPOCH] = 0
        words[_F_DURABLE_END] = progress.durable_end
        words[_F_HEARD] = progress.heard_ms
        words[_F_IS_COMPLETE] = progress.is_complete
        words[_F_MATCHED_END] = progress.matched_end
        words[_F_EPOCH] = progress.epoch

    def read(self) -> FollowerProgress:
        """The record. Epoch 0: nothing is known. Each field but the epoch may be newer than the others."""
        words = self._words
        epoch = words[_F_EPOCH]
        fields = words[_F_DURABLE_END], words[_F_HEARD], bool(words[_F_IS_COMPLETE])
        matched_end = words[_F_MATCHED_END]
        return FollowerProgress(epoch if words[_F_EPOCH] == epoch else 0, *fields, matched_end)

    def release(self) -> None:
        """Release the memory."""
        self._words.release()


class ControlBlock:
    """The page, mapped. CommitLog writes everything but `roles` and `followers`."""

    #: CommitLog's; 0: never begun
    incarnation: int = _field(_INCARNATION)
    #: CommitLog's state, a `State`
    state: int = _field(_STATE)
    #: which log the appended end is about
    log_generation: int = _field(_LOG_GENERATION)
    #: CommitLog's last heartbeat, monotonic ms
    heartbeat_ms: int = _field(_HEARTBEAT)
    #: 1: a missing heartbeat means that CommitLog hangs
    heartbeat_on: int = _field(_HEARTBEAT_ON)
    #: hints, see append_wakeups.py. 1: `appended` is about to move. The next `publish_appended` ends it, also when the
    #: put is refused
    appending: int = _field(_APPENDING)
    #: 1: CommitLog polls the synced end and needs no wakeup
    commit_log_polls: int = _field(_COMMIT_LOG_POLLS)

    def __init__(self, view: memoryview, *, files: Files) -> None:
        self._view = view
        self._files = files
        self._words = shared_words(view)
        #: role -> its record
        self.roles = {role: RoleRecord(self._words, role) for role in ROLES}
        #: replica id -> its record
        self.followers = [FollowerRecord(self._words, each) for each in range(REPLICAS_MAX)]

    @classmethod
    def open(cls, path: str, *, files: Files) -> ControlBlock:
        """Map the page, made zeroed if it is not there (a satellite may come before CommitLog).

        Raises: Rejected on an architecture that does not keep the order of stores.
        """
        return cls(map_shared(path, FILE_BYTES, files=files), files=files)

    def valid(self, boot: int) -> bool:
        """Whether the page is of this layout and this boot."""
        words = self._words
        return (words[_MAGIC], words[_VERSION], words[_BOOT]) == (MAGIC, VERSION, boot)

    def format(self, boot: int) -> None:
        """Make the page valid for this boot and clear the rest. Callers: CommitLog, when it is not valid."""
        words = self._words
        words[_MAGIC] = 0
        for record in self.roles.values():
            record.clear_counts()
            record.last_granted = 0
            # Fencing tokens are not reset: a satellite that waits here must not see an old token again.
            record.revoke_grant()
        for word in range(_STATE, _FIRST_ROLE):
            words[word] = 0
        words[_INCARNATION] = 0
        words[_VERSION] = VERSION
        words[_BOOT] = boot
        words[_MAGIC] = MAGIC

    def begin(
        self,
        incarnation: int,
        process: ProcessIdentity,
        appended: int,
        now_ms: int,
        *,
        pooled: bool = False,
    ) -> None:
        """A new CommitLog, or a new log after a truncation. Callers: CommitLog, while no role is granted."""
        words = self._words
        generation = next_tag(self.log_generation)
        words[_PID], words[_START_TIME] = process
        words[_HEARTBEAT] = now_ms
        # The previous process may have ended while it polled.
        words[_APPENDING] = words[_COMMIT_LOG_POLLS] = 0
        words[_POOLED] = pooled
        words[_LED_EPOCH] = 0
        # The field before its generation: in between, readers of either generation see 0.
        words[_APPENDED] = pack_field(generation, appended)
        words[_LOG_GENERATION] = generation
        words[_INCARNATION] = incarnation
        words[_STATE] = State.RUNNING

    def publish_options(self, changed: Mapping[str, int]) -> None:
        """Let the satellites follow options. Args: `changed`: those that were changed. Callers: CommitLog."""
        words = self._words
        found = [changed[name] + 1 if name in changed else 0 for name in SATELLITE_OPTIONS]
        last = _FIRST_OPTION + len(found)
        if words[_FIRST_OPTION:last].tolist() != found:
            for number, value in enumerate(found):
                words[_FIRST_OPTION + number] = value
            # Last: a satellite that sees it sees the values.
            words[_OPTIONS_VERSION] += 1

    @property
    def options_version(self) -> int:
        """Grows after the options have changed."""
        version: int = self._words[_OPTIONS_VERSION]
        return version

    def changed_options(self) -> dict[str, int]:
        """The options that were changed while the store was open. Callers: a satellite, after it read the version."""
        words = self._words
        return {
            name: words[_FIRST_OPTION + number] - 1
            for number, name in enumerate(SATELLITE_OPTIONS)
            if words[_FIRST_OPTION + number]
        }

    def publish_leadership(self, led: Leadership | None) -> None:
        """Say which epoch this replica leads; None: it follows. Callers: CommitLog."""
        words = self._words
        words[_LED_EPOCH] = 0
        if led is not None:
            words[_BEGUN_END], words[_PROCESS_INCARNATION] = led.begun_end, led.incarnation
            words[_LED_CONFIRMED] = led.confirmed
            words[_LED_EPOCH] = led.epoch

    @property
    def leadership(self) -> Leadership | None:
        """The epoch that this replica leads; None: it follows."""
        words = self._words
        epoch = words[_LED_EPOCH]
        fields = words[_BEGUN_END], words[_PROCESS_INCARNATION], words[_LED_CONFIRMED]
        led = Leadership(epoch, *fields)
        # Fields that belong to two epochs are read again later.
        return led if epoch and words[_LED_EPOCH] == epoch else None

    @property
    def leads(self) -> bool:
        """Whether this replica leads an epoch that Replication serves."""
        return bool(self._words[_LED_EPOCH])

    @property
    def process(self) -> ProcessIdentity:
        """CommitLog's process."""
        return ProcessIdentity(self._words[_PID], self._words[_START_TIME])

    def start_heartbeat(self, process: ProcessIdentity, now_ms: int) -> None:
        """Turn the heartbeat on: CommitLog without it is killed. Callers: CommitLog, with its store locked."""
        words = self._words
        words[_HEARTBEAT_ON] = 0
        words[_PID], words[_START_TIME] = process
        words[_HEARTBEAT] = now_ms
        words[_HEARTBEAT_ON] = 1

    @property
    def appended(self) -> int:
        """Every byte below is in the log; 0 while CommitLog is between two logs."""
        words = self._words
        return value_of(words[_APPENDED], words[_LOG_GENERATION])

    @property
    def committed(self) -> int:
        """Every byte below is in the log's files."""
        words = self._words
        if words[_POOLED]:
            return self.roles[COMMIT_REAL_TIME].committed
        return value_of(words[_APPENDED], words[_LOG_GENERATION])

    def publish_appended(self, end_offset: int) -> None:
        """Publish the appended end. Callers: CommitLog's writer, after the bytes."""
        words = self._words
        words[_APPENDED] = pack_field(words[_LOG_GENERATION], end_offset)
        words[_APPENDING] = 0

    def close(self) -> None:
        """Unmap."""
        for record in self.roles.values():
            record.release()
        for follower in self.followers:
            follower.release()
        self._words.release()
        self._files.unmap(self._view)
