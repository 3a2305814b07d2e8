"""The messages between replicas, of the log stream and of elections: one header and one message per frame.

Big-endian. Header (80 bytes): magic 4, version u8, kind u8, zero u16, cluster 16 (first bytes of the SHA-256 of its
id), shard u32, sender id u32, sender incarnation u64, addressee id u32, zero u32, addressee incarnation u64, epoch u64,
session u64, CRC-32C of everything but itself u32, length of the message u32. The log bytes of an AppendEntries travel
beside the frame as a separate body, so that they are not copied. Its units carry their CRC.

A session is the requests and answers of one connection. The leader numbers sessions, every answer repeats the number,
and frames of another session are dropped.
"""

from __future__ import annotations

import hashlib
import struct
from typing import NamedTuple, TypeAlias

from raymq.store.base.checksum import crc32c
from raymq.store.base.errors import Rejected
from raymq.store.log.chain import CHAIN_UNIT_BYTES, ChainUnit, unpack_units

from .incarnation import generation_of

MAGIC = b"RmqR"
VERSION = 7

#: candidates of one Probe
PROBE_LIMIT = 128
#: units of one AppendEntries: keeps a frame of tiny records small too
UNITS_LIMIT = 8192

_HEADER = struct.Struct(">4sBB2x16sIIQI4xQQQII")
_CRC_AT = _HEADER.size - 8
#: a generation, or the id of a replica
_U32 = struct.Struct(">I")


class ReplicaProcess(NamedTuple):
    """One process of a replica. A new process has a new incarnation; 0: not known yet."""

    id: int
    incarnation: int

    @property
    def generation(self) -> int:
        """How often the replica had been replaced when this process was made."""
        return generation_of(self.incarnation)


class FrameHeader(NamedTuple):
    """Sender, addressee, shard, epoch and session of a message."""

    cluster: bytes
    shard: int
    sender: ReplicaProcess
    addressee: ReplicaProcess
    epoch: int
    session: int


class Hello(NamedTuple):
    """Leader: my log's files end at `committed_end`, readers may see all records below `confirmed`."""

    committed_end: int
    confirmed: int


class HelloReply(NamedTuple):
    """Follower: how far my log is. `chain_value` is -1 if none of my units ends at `appended_end`."""

    appended_end: int
    durable_end: int
    confirmed: int
    chain_value: int
    epoch: int


class Probe(NamedTuple):
    """Leader: which of these (unit end, chain value after it) does your log have?"""

    candidates: tuple[tuple[int, int], ...]


class ProbeReply(NamedTuple):
    """Follower: the last candidate that my log has (-1: none), of the candidates that end at `last_end`."""

    candidate: int
    last_end: int


class AppendEntries(NamedTuple):
    """Leader: these units follow (prev_end, prev_chain). Without units: a heartbeat."""

    prev_end: int
    prev_chain: int
    confirmed: int
    units: tuple[ChainUnit, ...]

    @property
    def end(self) -> int:
        """The log must end here or later."""
        return self.units[-1].end if self.units else self.prev_end


class BeginLog(NamedTuple):
    """Leader: your log is empty, and my first stored byte is at `start`, where the chain value is `chain_value`."""

    start: int
    chain_value: int


class Ack(NamedTuple):
    """Follower: my log equals the leader's up to `matched_end`, and is durable up to `durable_end`."""

    matched_end: int
    appended_end: int
    durable_end: int
    #: the follower has everything that it ever reported as durable
    is_complete: bool = True


class Conflict(NamedTuple):
    """Follower: none of my units ends at your prev_end with that chain value. My last epoch and end."""

    epoch: int
    end: int


class Reason:
    """Why a follower refuses."""

    #: it has seen a newer epoch
    EPOCH = 1
    #: bytes below its confirmed end differ: an operator must repair a store
    HALTED = 2
    #: received bytes have another CRC than their unit
    DAMAGED = 3
    #: its store does not take writes (full, poisoned, stopping)
    UNAVAILABLE = 4


class Refusal(NamedTuple):
    """Follower: the request is refused. `highest_epoch`: the highest epoch that it has seen."""

    reason: int
    highest_epoch: int
    text: str


class LeaderEnded(NamedTuple):
    """Leader's Replication: the process that led this epoch has ended, and sends no heartbeat any more."""


# --- elections ------------------------------------------------------------------------------------


class PreVote(NamedTuple):
    """Would you vote for me in the epoch after yours? The answer binds no replica."""

    number: int
    #: of the candidate's last record
    last_epoch: int
    #: of the candidate's log
    end: int
    #: the candidate could send its log to the others
    can_stream: bool = True


class PreVoteReply(NamedTuple):
    """The answer to a PreVote."""

    number: int
    granted: bool
    is_complete: bool
    #: of a replica that cannot lead, and has more of the log than the candidate: epoch and end of what it gives
    last_epoch: int = 0
    end: int = 0


class RequestVote(NamedTuple):
    """Vote for me in the epoch of this message."""

    last_epoch: int
    end: int


class VoteReply(NamedTuple):
    """The answer to a RequestVote."""

    granted: bool
    is_complete: bool


class AskEpoch(NamedTuple):
    """Which is the highest epoch that you have heard? A replica that is not complete may have forgotten its own."""

    number: int


class EpochReply(NamedTuple):
    """The answer to an AskEpoch; the epoch is in the header."""

    number: int
    is_complete: bool


class CheckLeader(NamedTuple):
    """Am I still the leader of the newest epoch that you know? A leader's heartbeat."""

    number: int
    #: by replica id: the newest generation that the leader knows. A replica without one has the generation 0
    generations: tuple[int, ...] = ()


class CheckLeaderReply(NamedTuple):
    """The answer to a CheckLeader, given only in the leader's epoch."""

    number: int
    is_complete: bool
    #: the replica could send its log to the others
    can_stream: bool = True
    #: the replicas that it cannot call
    uncallable: tuple[int, ...] = ()


class Join(NamedTuple):
    """I am not complete: up to where must my log equal yours?"""

    nonce: int


class JoinReply(NamedTuple):
    """The answer to a Join, after a check that began later."""

    nonce: int
    target: int


class TakeOver(NamedTuple):
    """Your log has all of mine: ask for votes now."""


class NewerEpoch(NamedTuple):
    """Log bytes or a CheckLeader are refused: the sender serves the epoch of this message."""


Stream: TypeAlias = (
    Hello
    | HelloReply
    | Probe
    | ProbeReply
    | AppendEntries
    | Ack
    | Conflict
    | Refusal
    | LeaderEnded
    | BeginLog
)
Election: TypeAlias = (
    PreVote
    | PreVoteReply
    | RequestVote
    | VoteReply
    | AskEpoch
    | EpochReply
    | CheckLeader
    | CheckLeaderReply
    | Join
    | JoinReply
    | TakeOver
    | NewerEpoch
)
ReplicaMessage: TypeAlias = Stream | Election

#: the numbers of each message. A Probe repeats its layout. Units follow those of an AppendEntries, the text those of a
#: Refusal, generations (u32 each) those of a CheckLeader, replicas (u32 each) those of a CheckLeaderReply. The position
#: is the kind on the wire, from 1 on
_LAYOUTS: dict[type[ReplicaMessage], struct.Struct] = {
    Hello: struct.Struct(">qq"),
    HelloReply: struct.Struct(">qqqqq"),
    Probe: struct.Struct(">qI"),
    ProbeReply: struct.Struct(">qq"),
    AppendEntries: struct.Struct(">qIqI"),
    Ack: struct.Struct(">qqq?"),
    Conflict: struct.Struct(">qq"),
    Refusal: struct.Struct(">Bq"),
    PreVote: struct.Struct(">Qqq?"),
    PreVoteReply: struct.Struct(">Q??qq"),
    RequestVote: struct.Struct(">qq"),
    VoteReply: struct.Struct(">??"),
    AskEpoch: struct.Struct(">Q"),
    EpochReply: struct.Struct(">Q?"),
    CheckLeader: struct.Struct(">Q"),
    CheckLeaderReply: struct.Struct(">Q??"),
    Join: struct.Struct(">Q"),
    JoinReply: struct.Struct(">Qq"),
    TakeOver: struct.Struct(">"),
    NewerEpoch: struct.Struct(">"),
    LeaderEnded: struct.Struct(">"),
    BeginLog: struct.Struct(">qI"),
}
_KINDS = tuple(_LAYOUTS)


def cluster_key(cluster_id: str) -> bytes:
    """A cluster id, of any length, as the header's 16 bytes."""
    return hashlib.sha256(cluster_id.encode()).digest()[:16]


def encode(header: FrameHeader, message: ReplicaMessage) -> bytes:
    """One frame, without the log bytes of an AppendEntries."""
    payload = _pack(message)
    kind = _KINDS.index(type(message)) + 1
    to_whom = header.cluster, header.shard, *header.sender, *header.addressee
    head = _HEADER.pack(
        MAGIC, VERSION, kind, *to_whom, header.epoch, header.session, 0, len(payload)
    )
    crc = crc32c(payload, crc32c(head[:_CRC_AT]))
    return head[:_CRC_AT] + struct.pack(">II", crc, len(payload)) + payload


def decode(frame: bytes | memoryview) -> tuple[FrameHeader, ReplicaMessage]:
    """The inverse. Raises: Rejected for other bytes, another version, or a damaged frame."""
    data = bytes(frame)
    if len(data) < _HEADER.size or data[:4] != MAGIC:
        fault = "not a replication frame"
        raise Rejected(fault, field="magic", limit=MAGIC.hex(), found=data[:4].hex())

    _, version, kind, *fields, crc, length = _HEADER.unpack_from(data)
    if version != VERSION:
        raise Rejected(
            f"replication frame of version {version}, this side speaks {VERSION}: "
            "run one RayMQ version in a cluster",
            field="version",
            limit=VERSION,
            found=version,
        )

    payload = data[_HEADER.size :]
    if len(payload) != length or crc32c(payload, crc32c(data[:_CRC_AT])) != crc:
        fault = "replication frame is damaged"
        raise Rejected(fault, field="crc", limit=length, found=len(payload))
    if not 1 <= kind <= len(_KINDS):
        raise Rejected(f"unknown replication message {kind}", field="kind", limit=len(_KINDS))

    cluster, shard, *processes, epoch, session = fields
    sender, addressee = ReplicaProcess(*processes[:2]), ReplicaProcess(*processes[2:])
    header = FrameHeader(cluster, shard, sender, addressee, epoch, session)
    try:
        return header, _unpack(_KINDS[kind - 1], payload)
    except struct.error as error:
        fault = f"replication message {kind} has a wrong length"
        raise Rejected(fault, field="length", found=length) from error


def _pack(message: ReplicaMessage) -> bytes:
    layout = _LAYOUTS[type(message)]
    if isinstance(message, AppendEntries):
        numbers = layout.pack(*message[:3], len(message.units))
        return numbers + b"".join([unit.pack() for unit in message.units])
    if isinstance(message, Probe):
        return b"".join([layout.pack(*candidate) for candidate in message.candidates])
    if isinstance(message, Refusal):
        return layout.pack(message.reason, message.highest_epoch) + message.text.encode()
    if isinstance(message, CheckLeader):
        generations = [_U32.pack(each) for each in message.generations]
        return layout.pack(message.number) + b"".join(generations)
    if isinstance(message, CheckLeaderReply):
        uncallable = [_U32.pack(each) for each in message.uncallable]
        return layout.pack(*message[:3]) + b"".join(uncallable)
    return layout.pack(*message)


def _unpack(kind: type[ReplicaMessage], payload: bytes) -> ReplicaMessage:
    layout = _LAYOUTS[kind]
    if kind is AppendEntries:
        prev_end, prev_chain, confirmed, count = layout.unpack_from(payload)
        units = payload[layout.size :]
        if len(units) != count * CHAIN_UNIT_BYTES:
            raise struct.error
        return AppendEntries(prev_end, prev_chain, confirmed, tuple(unpack_units(units)))

    if kind is Probe:
        return Probe(tuple((end, value) for end, value in layout.iter_unpack(payload)))
    if kind is Refusal:
        reason, highest_epoch = layout.unpack_from(payload)
        return Refusal(reason, highest_epoch, payload[layout.size :].decode(errors="replace"))

    if kind is CheckLeader:
        (number,) = layout.unpack_from(payload)
        generations = _U32.iter_unpack(payload[layout.size :])
        return CheckLeader(number, tuple(each for (each,) in generations))
    if kind is CheckLeaderReply:
        number, is_complete, can_stream = layout.unpack_from(payload)
        uncallable = tuple(each for (each,) in _U32.iter_unpack(payload[layout.size :]))
        return CheckLeaderReply(number, is_complete, can_stream, uncallable)
    return kind._make(layout.unpack(payload))
