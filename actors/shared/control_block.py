"""The control block: the words through which the processes of one replica tell each other how far they are.

File `raymq/control`, one page, native byte order (it never leaves the machine). Every word has one writing process
and is read and written only as an item of an aligned `memoryview.cast("q")`: one 8-byte move. `struct.pack_into` was
measured to show other processes torn values in 18-21 % of polls.

    word   writer     meaning
    0      CommitLog  magic
    1      CommitLog  version of this layout
    2      CommitLog  hash of the boot id: pids and monotonic times of another boot mean nothing
    3      CommitLog  incarnation of CommitLog
    4      CommitLog  state
    5      CommitLog  log generation: bumped by every `begin`, so also around a truncation
    6, 7   CommitLog  pid, start time
    8      CommitLog  heartbeat, monotonic ms
    9      CommitLog  1: it beats, also in a recovery and beside a slow disk: satellites kill it when it is silent, see
                      heartbeat.py
    16     CommitLog  appended end, packed with the log generation
    17     CommitLog  1: an append has begun whose end is not in word 16 yet; a hint only
    18     CommitLog  1: CommitLog looks at the positions itself just now; GroupCommit leaves out its wakeup
    19     CommitLog  1: appended bytes are in the transient pool until CommitRealTime has committed them
    20     CommitLog  1: word 17 announced the append that ends at word 16: its producer may send the next one soon
    21     GroupCommit  1: it looks for the next append just now; CommitLog leaves out its wakeup
    32 + 32 * r       the record of role r:
      +0, +1  satellite  pid, start time
      +2      satellite  incarnation: "I am here"; written last, 0 while the words beside it change
      +3      satellite  heartbeat, monotonic ms
      +4      satellite  sync started: end of the sync that runs or ran last, packed with the generation
      +5      satellite  position: flushed end (flushers), committed end (CommitRealTime) or (replication) the end
                         below which puts kept a promise that names replicas, packed with the generation
      +6      satellite  failure: errno of a failed sync, packed with the generation
      +7      satellite  count of syncs (frames, commits); each life goes on where the one before ended
      +16     CommitLog  grant: incarnation that may work, packed with the generation granted
      +17     CommitLog  incarnation granted last; stays when the grant is taken back
      +18     CommitLog  base: end that was synced (confirmed, committed) when the grant was given
    384 + 32 * r      satellite  how long the syncs of role r took: counts and sum, see latency.py; as +7

Words +4 to +6 outlive their writer and are cleared by CommitLog when it begins (nobody is granted then): if both die,
they tell what the kernel will not tell again. Of CommitRealTime's position any generation counts: between two `begin`s
what was once written into the files stays there, whoever wrote it. So committed = max(base, position), grant or not.
Counts and latencies are cleared once in the life of CommitLog's process, before it grants anything: they are totals of
that life, whichever processes worked for it.

A packed word is (generation & 0x7FFF) << 48 | value: generation and value change in one move, and a reader that
expects another generation reads 0. Generation 0 is never granted, so a zeroed page says nothing.

Invariant: data, then word, then wakeup. x86_64 shows stores to other processes in their order. Where no wakeup is rung
nothing else orders them: Python has no barrier between processes. So other architectures are refused, see
docs/decisions/0010-x86-64-only.md.
"""

from __future__ import annotations

import os
from enum import IntEnum
from typing import NamedTuple

from raymq.store.errors import Rejected, broken
from raymq.store.files import Files
from raymq.store.promise import Flush

from .latency import WORDS as LATENCY_WORDS
from .latency import Latencies, LatencyCounter, latencies
from .processes import INCARNATION_BITS, ProcessIdentity
from .ring import map_shared

FILE_BYTES = 4096
MAGIC = int.from_bytes(b"RayMQctl", "big")
VERSION = 1

#: architectures on which the invariant above holds
ARCHITECTURES = ("x86_64",)
#: the order is the layout
ROLES = ("group_commit", "flush_real_time", "replication", "commit_real_time")
#: flush mode -> the role that syncs
FLUSHERS: dict[Flush, str] = {"sync": "group_commit", "async": "flush_real_time"}
COMMIT_LOG = "commit_log"
COMMIT_REAL_TIME = "commit_real_time"

#: how long after its wakeup a satellite looks, without sleeping, for the append that word 17 announces: going to sleep
#: and being woken costs about as much
ANNOUNCED_US = 500
#: how long, behind an announced append, GroupCommit looks without sleeping for its producer's next one: a client's way
#: there and back
POLL_US = 1_500

_MAGIC, _VERSION, _BOOT, _INCARNATION, _STATE, _LOG_GENERATION = range(6)
_PID, _START_TIME, _HEARTBEAT, _BEATING, _APPENDED, _APPENDING, _WATCHING = 6, 7, 8, 9, 16, 17, 18
_POOLED, _ANNOUNCED, _POLLING = 19, 20, 21
_FIRST_ROLE, _ROLE_WORDS = 32, 32
_FIRST_LATENCY = 384
_R_PID, _R_START_TIME, _R_INCARNATION, _R_HEARTBEAT, _R_SYNC_STARTED = range(5)
_R_POSITION, _R_FAILURE, _R_SYNCS = range(5, 8)
_R_GRANT, _R_LAST_GRANTED, _R_BASE = 16, 17, 18

_VALUE_BITS = INCARNATION_BITS
_VALUE_MASK = (1 << _VALUE_BITS) - 1
_GENERATION_MASK = 0x7FFF


class State(IntEnum):
    """What CommitLog says of itself."""

    #: not begun since the page was made
    NEW = 0
    RUNNING = 1
    #: closed in order; satellites leave
    STOPPED = 2
    #: a sync failed: nothing is granted any more
    POISONED = 3


def check_architecture(machine: str) -> None:
    """Raises: Rejected where words may be seen before the data that they tell of. Args: machine: of `os.uname()`."""
    if machine not in ARCHITECTURES:
        raise Rejected(
            f"the processes of a replica share memory in an order that {machine} does not keep; run the shards on "
            f"{', '.join(ARCHITECTURES)} (clients may be elsewhere)",
            field="machine",
            limit=", ".join(ARCHITECTURES),
            found=machine,
        )


def shared_file(replica_dir: str, name: str) -> str:
    """Path of `control`, `ring-replication` or `<role>.lock` of a replica."""
    return f"{replica_dir}/raymq/{name}"


def pack_word(generation: int, value: int) -> int:
    """One word of both. Args: value: [0, 2**48)."""
    if not 0 <= value <= _VALUE_MASK:
        raise broken("value does not fit a control word", value=value)
    return (generation & _GENERATION_MASK) << _VALUE_BITS | value


def unpack_word(word: int) -> tuple[int, int]:
    """(generation, value)."""
    return word >> _VALUE_BITS & _GENERATION_MASK, word & _VALUE_MASK


def value_of(word: int, generation: int) -> int:
    """The value, or 0 if the word is of another generation (0 is no generation)."""
    found = word >> _VALUE_BITS & _GENERATION_MASK
    return word & _VALUE_MASK if found == generation and generation else 0


def next_generation(generation: int) -> int:
    """The generation after this one: 1 to 0x7FFF, around."""
    return generation % _GENERATION_MASK + 1


class Registration(NamedTuple):
    """Who says "I am here" for a role."""

    incarnation: int
    process: ProcessIdentity


class RoleRecord:
    """The record of one role. The satellite calls `register` to `publish_count`, CommitLog the rest."""

    def __init__(self, words: memoryview, role: str) -> None:
        base = _FIRST_ROLE + ROLES.index(role) * _ROLE_WORDS
        self._words = words[base : base + _ROLE_WORDS]
        latency = _FIRST_LATENCY + ROLES.index(role) * _ROLE_WORDS
        self._latency = words[latency : latency + LATENCY_WORDS]
        #: which role
        self.role = role

    def register(self, registration: Registration, now_ms: int) -> None:
        """Say "I am here". Sync, position and failure stay: a dead one's last words, which CommitLog may still need.

        Counts stay too: they go on.
        """
        words = self._words
        words[_R_INCARNATION] = 0
        words[_R_PID], words[_R_START_TIME] = registration.process
        words[_R_HEARTBEAT] = now_ms
        words[_R_INCARNATION] = registration.incarnation

    def beat(self, now_ms: int) -> None:
        """Say "I live"."""
        self._words[_R_HEARTBEAT] = now_ms

    def publish_sync_started(self, generation: int, end_offset: int) -> None:
        """Before each sync: what a later success will mean."""
        self._words[_R_SYNC_STARTED] = pack_word(generation, end_offset)

    def publish_position(self, generation: int, end_offset: int) -> None:
        """After each success: everything below is flushed (committed, acknowledged)."""
        self._words[_R_POSITION] = pack_word(generation, end_offset)

    def publish_failure(self, generation: int, errno: int) -> None:
        """A sync failed."""
        self._words[_R_FAILURE] = pack_word(generation, errno)

    def publish_count(self, syncs: int) -> None:
        """The total of all lives since `clear_counts`."""
        self._words[_R_SYNCS] = syncs

    def clear(self, base: int) -> None:
        """Forget the last words of the dead. Callers: CommitLog, with nobody granted, when it has acted on them."""
        for word in (_R_SYNC_STARTED, _R_POSITION, _R_FAILURE):
            self._words[word] = 0
        self._words[_R_BASE] = base

    def clear_counts(self) -> None:
        """Begin to count at 0. Callers: CommitLog, once in its process, when nobody works any more."""
        self.publish_count(0)
        self.sync_latency.clear()

    def registration(self) -> Registration | None:
        """Who is here; None while nobody is or the record is being written."""
        words = self._words
        incarnation: int = words[_R_INCARNATION]
        process = ProcessIdentity(words[_R_PID], words[_R_START_TIME])
        if not incarnation or words[_R_INCARNATION] != incarnation:
            return None
        return Registration(incarnation, process)

    @property
    def heartbeat_ms(self) -> int:
        """Monotonic ms of the last beat."""
        value: int = self._words[_R_HEARTBEAT]
        return value

    @property
    def sync_started(self) -> tuple[int, int]:
        """(generation, end)."""
        return unpack_word(self._words[_R_SYNC_STARTED])

    @property
    def failure(self) -> tuple[int, int]:
        """(generation, errno); errno 0: none."""
        return unpack_word(self._words[_R_FAILURE])

    @property
    def count(self) -> int:
        """Syncs since CommitLog's process took over, of all lives."""
        value: int = self._words[_R_SYNCS]
        return value

    @property
    def sync_latency(self) -> LatencyCounter:
        """Counts how long the syncs take, on from the lives before. Callers: the satellite."""
        return LatencyCounter(self._latency)

    @property
    def sync_latencies(self) -> Latencies:
        """How long the syncs took since CommitLog's process took over, in all lives."""
        return latencies(self._latency)

    @property
    def committed(self) -> int:
        """Everything below is in the files, as far as CommitRealTime told since `begin`; it never falls."""
        return max(self.base, unpack_word(self._words[_R_POSITION])[1])

    def position(self, generation: int) -> int:
        """The end published under this generation, else 0."""
        return value_of(self._words[_R_POSITION], generation)

    @property
    def grant(self) -> tuple[int, int]:
        """(generation, incarnation that may work; 0: nobody). One word: a reader never sees half a grant."""
        return unpack_word(self._words[_R_GRANT])

    @property
    def granted(self) -> bool:
        """Whether somebody may work."""
        return bool(self._words[_R_GRANT] & _VALUE_MASK)

    @property
    def last_granted(self) -> int:
        """The incarnation granted last, also after its grant was taken back; its process must die before the next."""
        value: int = self._words[_R_LAST_GRANTED]
        return value

    @property
    def base(self) -> int:
        """Where a granted one starts: everything below was flushed (confirmed) before its grant."""
        value: int = self._words[_R_BASE]
        return value

    def give_grant(self, incarnation: int, base: int) -> int:
        """CommitLog lets this incarnation work from `base` on. Returns: the generation it works under."""
        generation = next_generation(self.grant[0])
        self._words[_R_BASE] = base
        # First: whoever finds this CommitLog dead must know whom it may have let in.
        self._words[_R_LAST_GRANTED] = incarnation
        self._words[_R_GRANT] = pack_word(generation, incarnation)
        return generation

    def take_grant_back(self) -> None:
        """From this move on, words of the old generation count as 0 and nobody may work."""
        self._words[_R_GRANT] = pack_word(next_generation(self.grant[0]), 0)

    def release(self) -> None:
        """Let go of the memory."""
        self._latency.release()
        self._words.release()


class ControlBlock:
    """The page, mapped."""

    def __init__(self, view: memoryview, *, files: Files) -> None:
        self._view = view
        self._files = files
        self._words = view.cast("q")
        #: role -> its record
        self.roles = {role: RoleRecord(self._words, role) for role in ROLES}

    @classmethod
    def open(cls, path: str, *, files: Files) -> ControlBlock:
        """Map the page, made zeroed if it is not there (a satellite may come before CommitLog).

        Raises: Rejected on another architecture.
        """
        check_architecture(os.uname().machine)
        return cls(map_shared(path, FILE_BYTES, files=files), files=files)

    def valid(self, boot: int) -> bool:
        """Whether the page is of this layout and this boot."""
        words = self._words
        return (words[_MAGIC], words[_VERSION], words[_BOOT]) == (MAGIC, VERSION, boot)

    def format(self, boot: int) -> None:
        """Make the page valid for this boot, forgetting all else. Callers: CommitLog, when it is not."""
        words = self._words
        words[_MAGIC] = 0
        for role, record in self.roles.items():
            # Generations go on even so: a satellite that waits here must not meet an old number again.
            record.clear_counts()
            generation = record.grant[0]
            base = _FIRST_ROLE + ROLES.index(role) * _ROLE_WORDS
            words[base + _R_LAST_GRANTED] = 0
            words[base + _R_GRANT] = pack_word(next_generation(generation), 0)
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
        """A new life of CommitLog, or a new log after a truncation. Callers: CommitLog, with nobody granted."""
        words = self._words
        generation = next_generation(self.log_generation)
        words[_PID], words[_START_TIME] = process
        words[_HEARTBEAT] = now_ms
        # The life before may have ended while it watched.
        words[_APPENDING] = words[_WATCHING] = words[_ANNOUNCED] = words[_POLLING] = 0
        words[_POOLED] = pooled
        # The word before its generation: in between, readers of either generation see 0.
        words[_APPENDED] = pack_word(generation, appended)
        words[_LOG_GENERATION] = generation
        words[_INCARNATION] = incarnation
        words[_STATE] = State.RUNNING

    @property
    def incarnation(self) -> int:
        """CommitLog's; 0: never begun."""
        value: int = self._words[_INCARNATION]
        return value

    @property
    def process(self) -> ProcessIdentity:
        """CommitLog's process."""
        return ProcessIdentity(self._words[_PID], self._words[_START_TIME])

    @property
    def state(self) -> State:
        """CommitLog's state."""
        return State(self._words[_STATE])

    @state.setter
    def state(self, state: State) -> None:
        self._words[_STATE] = state

    @property
    def log_generation(self) -> int:
        """Which log the appended word is about."""
        value: int = self._words[_LOG_GENERATION]
        return value

    @property
    def heartbeat_ms(self) -> int:
        """CommitLog's last beat, monotonic ms."""
        value: int = self._words[_HEARTBEAT]
        return value

    def beat(self, now_ms: int) -> None:
        """CommitLog says "I live"."""
        self._words[_HEARTBEAT] = now_ms

    def begin_beating(self, process: ProcessIdentity, now_ms: int) -> None:
        """From now on a silent CommitLog is to be killed. Callers: CommitLog, with the store's lock."""
        words = self._words
        words[_BEATING] = 0
        words[_PID], words[_START_TIME] = process
        words[_HEARTBEAT] = now_ms
        words[_BEATING] = 1

    def end_beating(self) -> None:
        """CommitLog stops: its silence means nothing any more."""
        self._words[_BEATING] = 0

    @property
    def beating(self) -> bool:
        """Whether CommitLog's silence means that it hangs."""
        return bool(self._words[_BEATING])

    @property
    def appended(self) -> int:
        """Every byte below is in the log; 0 while it is between two logs."""
        words = self._words
        return value_of(words[_APPENDED], words[_LOG_GENERATION])

    @property
    def committed(self) -> int:
        """Every byte below is in the log's files."""
        words = self._words
        if words[_POOLED]:
            return self.roles[COMMIT_REAL_TIME].committed
        return value_of(words[_APPENDED], words[_LOG_GENERATION])

    def publish_appended(self, end_offset: int, *, announced: bool = False) -> None:
        """Callers: CommitLog's writer, after the bytes. Args: announced: to GroupCommit, see the property."""
        words = self._words
        words[_ANNOUNCED] = announced
        words[_APPENDED] = pack_word(words[_LOG_GENERATION], end_offset)
        words[_APPENDING] = 0

    @property
    def appending(self) -> bool:
        """Whether `appended` will move in a moment."""
        return bool(self._words[_APPENDING])

    def announce_append(self) -> None:
        """Callers: CommitLog, before an append.

        The next `publish_appended` takes it back, also when this put is refused.
        """
        self._words[_APPENDING] = 1

    @property
    def watching(self) -> bool:
        """Whether CommitLog looks at the positions all the time and needs no wakeup."""
        return bool(self._words[_WATCHING])

    @watching.setter
    def watching(self, watching: bool) -> None:
        self._words[_WATCHING] = watching

    @property
    def announced(self) -> bool:
        """Whether the last append was announced to GroupCommit: small, with nothing before it that is waited for.

        Mostly its producer waits for it, and sends the next one then. As `announce_append` a hint, never trusted.
        """
        return bool(self._words[_ANNOUNCED])

    @property
    def polling(self) -> bool:
        """Whether GroupCommit looks for the next append all the time and needs no wakeup."""
        return bool(self._words[_POLLING])

    @polling.setter
    def polling(self, polling: bool) -> None:
        self._words[_POLLING] = polling

    def close(self) -> None:
        """Unmap."""
        for record in self.roles.values():
            record.release()
        self._words.release()
        self._files.unmap(self._view)
