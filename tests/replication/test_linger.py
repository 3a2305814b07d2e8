"""When a follower that no put waits for gets the bytes of the leader's log."""

from __future__ import annotations

import math

import pytest

from raymq.replication import wire
from raymq.replication.log_sender import (
    ClockTick,
    Connected,
    Disconnected,
    FrameReceived,
    LeaderProgress,
    LogSender,
    Send,
    SenderEvent,
    SenderLimits,
)
from raymq.store.log.chain import ChainUnit

CLUSTER, LEADER, FOLLOWER = b"c" * 16, wire.ReplicaProcess(0, 7), wire.ReplicaProcess(1, 5)
UNIT_BYTES = 100


class Chain:
    """A chain of as many equal units as are asked for."""

    def read_from(self, offset: int, max_bytes: int) -> list[ChainUnit]:
        starts = range(offset, offset + max_bytes, UNIT_BYTES)
        return [ChainUnit(start, start + UNIT_BYTES, 0, 1, 0) for start in starts]


class Stream:
    """A sender, and the follower that answers it."""

    def __init__(self, **limits: int) -> None:
        self.sender = LogSender(
            cluster=CLUSTER,
            shard=0,
            me=LEADER,
            follower_id=FOLLOWER.id,
            chain=Chain(),
            segment_size_bytes=1 << 20,
            limits=SenderLimits(linger_ms=10, linger_bytes=1000, **limits),
        )
        self.sessions = 0
        self.sender.step(ClockTick(), 0)
        self.begin(0)

    def begin(self, end: int) -> None:
        """Answer a new session."""
        self.sessions += 1
        self.sender.step(Connected(), 0)
        self.hear(wire.HelloReply(0, 0, 0, 0, 0), 0)
        self.hear(wire.Ack(end, end, end), 0)

    def hear(self, message: wire.ReplicaMessage, now_ms: int) -> None:
        header = wire.FrameHeader(CLUSTER, 0, FOLLOWER, LEADER, 0, self.sessions)
        self.sender.step(FrameReceived(header, message), now_ms)

    def sent(self, event: SenderEvent, now_ms: int) -> list[tuple[int, int]]:
        """The ranges of log bytes that an event lets the sender send."""
        effects = self.sender.step(event, now_ms)
        return [(each.start, each.stop) for each in effects if isinstance(each, Send)]


@pytest.fixture
def stream() -> Stream:
    return Stream()


def lingering(committed: int) -> LeaderProgress:
    return LeaderProgress(committed, 0, may_linger=True)


def test_a_follower_that_puts_wait_for_gets_each_byte_at_once(stream: Stream) -> None:
    assert stream.sent(LeaderProgress(100, 0), 20) == [(0, 100)]
    assert stream.sent(LeaderProgress(200, 0), 20) == [(100, 200)]


def test_another_one_gets_the_bytes_of_many_puts_in_one_frame_10_ms_after_the_first(
    stream: Stream,
) -> None:
    assert stream.sent(lingering(100), 20) == []
    assert stream.sender.wait_ms(20) == 10
    assert stream.sent(lingering(300), 26) == []
    assert stream.sender.wait_ms(26) == 4
    assert stream.sent(ClockTick(), 29) == []
    assert stream.sent(ClockTick(), 30) == [(0, 300)]
    # The next bytes wait from their own time on.
    assert stream.sent(lingering(400), 38) == []
    assert stream.sender.wait_ms(38) == 10
    assert stream.sent(ClockTick(), 48) == [(300, 400)]


def test_many_bytes_do_not_linger(stream: Stream) -> None:
    assert stream.sent(lingering(900), 20) == []
    assert stream.sent(lingering(1000), 21) == [(0, 1000)]


def test_a_follower_that_becomes_prompt_gets_at_once_what_lingers(stream: Stream) -> None:
    assert stream.sent(lingering(100), 20) == []
    assert stream.sent(LeaderProgress(100, 0), 21) == [(0, 100)]


def test_bytes_that_linger_when_the_connection_breaks_are_sent_by_the_next_one(
    stream: Stream,
) -> None:
    assert stream.sent(lingering(100), 20) == []
    assert stream.sent(Disconnected("lost"), 21) == []
    stream.sender.step(ClockTick(), 500)
    stream.begin(0)
    assert stream.sent(lingering(100), 500) == [(0, 100)]


def test_a_sender_whose_window_is_full_waits_for_an_ack_or_the_heartbeat(stream: Stream) -> None:
    for number in range(1, 40):
        stream.sent(lingering(100 * number), 10 * number)
        stream.sent(ClockTick(), 10 * number + 10)
    # The window has 16 frames, and no ack has come.
    assert stream.sent(ClockTick(), 401) == []
    assert stream.sender.wait_ms(401) > 0
    stream.hear(wire.Ack(1600, 1600, 1600), 402)
    assert stream.sender.wait_ms(402) > 0


@pytest.fixture
def throttled() -> Stream:
    """A stream that may carry a frame of 1,000 bytes in 100 ms to a follower that catches up."""
    return Stream(frame_bytes=1000, catch_up_bytes_per_s=10_000)


def test_a_follower_that_catches_up_gets_so_many_bytes_a_second(throttled: Stream) -> None:
    assert throttled.sent(lingering(5000), 20) == [(0, 1000)]
    assert throttled.sender.wait_ms(20) == 100
    throttled.hear(wire.Ack(1000, 1000, 1000), 30)
    assert throttled.sent(ClockTick(), 119) == []
    assert throttled.sent(ClockTick(), 120) == [(1000, 2000)]
    # A late call does not make up for the time in which nothing was sent.
    assert throttled.sent(ClockTick(), 500) == [(2000, 3000)]
    assert throttled.sender.wait_ms(500) == 100


def test_another_limit_holds_from_the_next_frame_on(throttled: Stream) -> None:
    assert throttled.sent(lingering(5000), 20) == [(0, 1000)]
    throttled.sender.set_limits(SenderLimits(frame_bytes=1000, catch_up_bytes_per_s=20_000))
    throttled.hear(wire.Ack(1000, 1000, 1000), 30)
    assert throttled.sent(ClockTick(), 120) == [(1000, 2000)]
    assert throttled.sender.wait_ms(120) == 50


def test_a_follower_that_puts_wait_for_is_not_throttled(throttled: Stream) -> None:
    ranges = [(start, start + 1000) for start in range(0, 5000, 1000)]
    assert throttled.sent(LeaderProgress(5000, 0), 20) == ranges


def test_what_is_less_than_a_frame_is_not_throttled(throttled: Stream) -> None:
    assert throttled.sent(lingering(1900), 20) == [(0, 1000)]
    assert throttled.sent(ClockTick(), 30) == [(1000, 1900)]


def test_the_time_of_an_ack_is_smoothed_and_a_longer_wait_counts_at_once(stream: Stream) -> None:
    sender = stream.sender
    assert sender.ack_ms(100) == math.inf
    sender.step(LeaderProgress(100, 0), 100)
    # The bytes are there, and not durable yet.
    stream.hear(wire.Ack(100, 100, 0), 110)
    assert sender.ack_ms(110) == math.inf
    stream.hear(wire.Ack(100, 100, 100), 120)
    assert sender.ack_ms(120) == 20.0
    sender.step(LeaderProgress(200, 0), 200)
    assert sender.ack_ms(210) == 20.0
    assert sender.ack_ms(250) == 50.0
    stream.hear(wire.Ack(200, 200, 200), 300)
    assert sender.ack_ms(300) == 30.0
