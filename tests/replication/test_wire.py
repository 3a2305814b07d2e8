"""Frames: decoding inverts encoding, and other bytes are refused."""

from __future__ import annotations

import pytest

from raymq.replication.wire import (
    Ack,
    AppendEntries,
    AskEpoch,
    CheckLeader,
    CheckLeaderReply,
    Conflict,
    EpochReply,
    FrameHeader,
    Hello,
    HelloReply,
    Join,
    JoinReply,
    LeaderEnded,
    NewerEpoch,
    PreVote,
    PreVoteReply,
    Probe,
    ProbeReply,
    Reason,
    Refusal,
    ReplicaProcess,
    RequestVote,
    TakeOver,
    VoteReply,
    cluster_key,
    decode,
    encode,
)
from raymq.store.base.errors import Rejected
from raymq.store.log.chain import ChainUnit

HEADER = FrameHeader(cluster_key("c"), 3, ReplicaProcess(0, 2**63 - 1), ReplicaProcess(1, 17), 5, 9)
UNITS = (ChainUnit(10, 30, 5, 2**32 - 1, 7), ChainUnit(30, 2**40, 5, 1, 8))
MESSAGES = [
    Hello(100, 50),
    HelloReply(100, 90, 50, -1, 5),
    Probe(((0, 0), (2**40, 2**32 - 1))),
    Probe(()),
    ProbeReply(-1, 100),
    AppendEntries(10, 2**32 - 1, 5, UNITS),
    AppendEntries(10, 0, 5, ()),
    Ack(10, 20, 5),
    Conflict(5, 100),
    LeaderEnded(),
    Refusal(Reason.HALTED, 6, "Bytes verschieden: ü"),
    PreVote(2**63, 5, 100),
    PreVoteReply(1, True, False),
    RequestVote(5, 100),
    VoteReply(False, True),
    AskEpoch(3),
    EpochReply(3, False),
    CheckLeader(4),
    CheckLeader(4, (0, 2**15 - 1, 1)),
    CheckLeaderReply(4, True),
    CheckLeaderReply(4, False, True, (0, 2, 2**32 - 1)),
    Join(5),
    JoinReply(5, 2**40),
    TakeOver(),
    NewerEpoch(),
]


@pytest.mark.parametrize("message", MESSAGES, ids=[type(m).__name__ for m in MESSAGES])
def test_a_message_comes_back_as_it_was(message):
    assert decode(encode(HEADER, message)) == (HEADER, message)


def test_a_flipped_bit_anywhere_is_detected():
    frame = encode(HEADER, MESSAGES[5])
    for bit in range(len(frame) * 8):
        damaged = bytearray(frame)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Rejected):
            decode(bytes(damaged))


def test_a_frame_cut_short_is_refused():
    frame = encode(HEADER, MESSAGES[5])
    for length in range(len(frame)):
        with pytest.raises(Rejected):
            decode(frame[:length])


def test_another_version_is_named():
    frame = bytearray(encode(HEADER, MESSAGES[0]))
    frame[4] = 9
    with pytest.raises(Rejected) as refused:
        decode(bytes(frame))
    assert refused.value.fields["found"] == 9
    assert refused.value.fields["field"] == "version"
