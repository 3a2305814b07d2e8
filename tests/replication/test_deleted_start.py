"""A leader whose oldest files are deleted, and followers that end before, at and after the remaining start."""

from __future__ import annotations

import pytest

from raymq.replication.log_sender import ClockTick as Time
from raymq.replication.log_sender import (
    Connected,
    Disconnect,
    FrameReceived,
    Halt,
    LeaderProgress,
    LogSender,
    Phase,
    Send,
    SenderEffect,
    SenderLimits,
)
from raymq.replication.wire import (
    Ack,
    AppendEntries,
    BeginLog,
    FrameHeader,
    HelloReply,
    Probe,
    ProbeReply,
    ReplicaProcess,
)
from raymq.store.log.chain import ChainUnit

SIZE = 4096
CLUSTER = b"c" * 16
ME, PEER = ReplicaProcess(0, 7), ReplicaProcess(1, 9)


def chain(count: int) -> list[ChainUnit]:
    """Units of 1 KiB, four per segment."""
    units: list[ChainUnit] = []
    for number in range(count):
        previous = units[-1].value if units else 0
        units.append(ChainUnit(number * 1024, (number + 1) * 1024, 0, number, previous))
    return units


class Left:
    """The remaining chain: a deleted segment has no units."""

    def __init__(self, units: list[ChainUnit], start: int) -> None:
        self._units = [unit for unit in units if unit.start >= start]

    def delete_before(self, start: int) -> None:
        self._units = [unit for unit in self._units if unit.start >= start]

    def read_from(self, offset: int, max_bytes: int) -> list[ChainUnit]:
        stop = (offset // SIZE + 1) * SIZE
        found = [unit for unit in self._units if offset <= unit.start < stop]
        return found[: max(1, max_bytes // 1024)] if found and found[0].start == offset else []


UNITS = chain(16)


def greet(
    ends: int, value: int, *, known_start: int, start: int, deleted: int = 0
) -> list[SenderEffect]:
    """The leader's effects after a follower has reported the end of its log.

    Args: `deleted`: what is below was deleted after the stream was opened.
    """
    leader = LogSender(
        cluster=CLUSTER,
        shard=0,
        me=ME,
        follower_id=1,
        chain=Left(UNITS, max(start, deleted)),
        segment_size_bytes=SIZE,
        log_start=known_start,
    )

    leader.step(LeaderProgress(16 * 1024, 0), 0)
    leader.step(Time(), 0)
    leader.step(Connected(start), 1)
    hello = HelloReply(ends, ends, 0, value, 0)
    effects = leader.step(FrameReceived(FrameHeader(CLUSTER, 0, PEER, ME, 0, 1), hello), 2)

    while probes := [
        e.message for e in effects if isinstance(e, Send) and isinstance(e.message, Probe)
    ]:
        (probe,) = probes
        # The follower has the bytes up to its end, in the leader's units.
        held = [i for i, match in enumerate(probe.candidates) if match[0] <= ends and ends >= start]
        answer = ProbeReply(held[-1] if held else -1, probe.candidates[-1][0])
        effects = leader.step(FrameReceived(FrameHeader(CLUSTER, 0, PEER, ME, 0, 1), answer), 3)

    return effects


@pytest.mark.parametrize("known_start", [0, 2 * SIZE])
@pytest.mark.parametrize("ends", [1024, 2 * SIZE - 1024])
def test_a_follower_that_ends_before_the_start_must_be_replaced_and_the_error_says_so(
    ends: int, known_start: int
) -> None:
    effects = greet(ends, -1, known_start=known_start, start=2 * SIZE)
    (halt,) = [effect for effect in effects if isinstance(effect, Halt)]
    assert "begins at 8192" in halt.reason
    assert "raymq shard replace-replica" in halt.reason


@pytest.mark.parametrize("known_start", [0, 2 * SIZE])
@pytest.mark.parametrize("value", [0, -1])
def test_an_empty_follower_begins_where_the_leaders_log_does(value: int, known_start: int) -> None:
    effects = greet(0, value, known_start=known_start, start=2 * SIZE)
    begin, append = [effect.message for effect in effects if isinstance(effect, Send)][:2]
    before = next(unit.value for unit in UNITS if unit.end == 2 * SIZE)
    assert begin == BeginLog(2 * SIZE, before)
    assert isinstance(append, AppendEntries)
    assert (append.prev_end, append.prev_chain) == begin


def test_a_stream_whose_next_file_is_deleted_begins_a_new_session() -> None:
    chain = Left(UNITS, 0)
    leader = LogSender(
        cluster=CLUSTER, shard=0, me=ME, follower_id=1, chain=chain, segment_size_bytes=SIZE
    )
    leader.step(LeaderProgress(1024, 0), 0)
    leader.step(Time(), 0)
    leader.step(Connected(0), 1)
    header = FrameHeader(CLUSTER, 0, PEER, ME, 0, 1)
    leader.step(FrameReceived(header, HelloReply(0, 0, 0, 0, 0)), 2)
    assert leader.phase is Phase.STREAMING

    chain.delete_before(2 * SIZE)
    limit_ms = SenderLimits().silence_ms
    effects = leader.step(LeaderProgress(16 * 1024, 0), 10)
    for now_ms in range(20, limit_ms + 20, 500):
        # The follower is there all the time.
        effects += leader.step(FrameReceived(header, Ack(1024, 1024, 1024)), now_ms)
    assert not [effect for effect in effects if isinstance(effect, Disconnect)]
    assert Disconnect("no units") in leader.step(Time(), limit_ms + 20)
    assert leader.phase is Phase.IDLE

    # The match of the session before is deleted, too.
    leader.step(Time(), 2 * limit_ms)
    leader.step(Connected(2 * SIZE), 2 * limit_ms)
    header = header._replace(session=2)
    ended = HelloReply(1024, 1024, 0, UNITS[0].value, 0)
    effects = leader.step(FrameReceived(header, ended), 2 * limit_ms)
    assert [effect for effect in effects if isinstance(effect, Halt)]


def test_a_start_that_was_deleted_meanwhile_is_looked_up_again() -> None:
    effects = greet(0, 0, known_start=0, start=SIZE, deleted=2 * SIZE)
    assert Disconnect("deleted") in effects
    assert not [effect for effect in effects if isinstance(effect, Halt)]


@pytest.mark.parametrize("ends", [2 * SIZE, 2 * SIZE + 1024, 4 * SIZE])
@pytest.mark.parametrize("reported", [True, False])
def test_a_follower_that_ends_at_or_after_the_start_goes_on_from_there(
    ends: int, reported: bool
) -> None:
    value = next(unit.value for unit in UNITS if unit.end == ends)
    effects = greet(ends, value if reported else -1, known_start=0, start=2 * SIZE)
    appends = [
        e.message for e in effects if isinstance(e, Send) and isinstance(e.message, AppendEntries)
    ]
    assert appends
    assert appends[0].prev_end <= ends
    assert not [effect for effect in effects if isinstance(effect, Halt)]
