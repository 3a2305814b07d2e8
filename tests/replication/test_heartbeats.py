"""How often the leader's stream says something to a follower that has nothing to do."""

from __future__ import annotations

from raymq.replication import wire
from raymq.replication.log_sender import (
    ClockTick,
    Connected,
    FrameReceived,
    LeaderProgress,
    LogSender,
    Send,
    SenderLimits,
)
from raymq.store.log.chain import ChainUnit

CLUSTER, LEADER, FOLLOWER = b"c" * 16, wire.ReplicaProcess(0, 7), wire.ReplicaProcess(1, 5)
LIMITS = SenderLimits(heartbeat_ms=200, idle_heartbeat_ms=500)


class Chain:
    """A chain of one unit."""

    unit = ChainUnit(0, 100, 0, 1, 0)

    def read_from(self, offset: int, max_bytes: int) -> list[ChainUnit]:
        return [self.unit] if offset == 0 else []


def test_an_idle_stream_is_heard_less_often_than_one_whose_follower_lacks_something() -> None:
    sender = LogSender(
        cluster=CLUSTER,
        shard=0,
        me=LEADER,
        follower_id=FOLLOWER.id,
        chain=Chain(),
        segment_size_bytes=4096,
        limits=LIMITS,
    )

    def hear(message: wire.ReplicaMessage, now_ms: int) -> None:
        header = wire.FrameHeader(CLUSTER, 0, FOLLOWER, LEADER, 0, 1)
        sender.step(FrameReceived(header, message), now_ms)

    sender.step(ClockTick(), 1000)
    sender.step(Connected(), 1000)
    hear(wire.HelloReply(0, 0, 0, 0, 0), 1000)
    hear(wire.Ack(0, 0, 0), 1000)
    # The follower has all.
    assert sender.wait_ms(1000) == 500
    assert sender.step(ClockTick(), 1499) == []
    assert isinstance(sender.step(ClockTick(), 1500)[0], Send)

    # It lacks the durable end of these bytes, and then the confirmed end.
    sender.step(LeaderProgress(100, 0), 1600)
    assert sender.wait_ms(1600) == 200
    hear(wire.Ack(100, 100, 100), 1600)
    assert sender.wait_ms(1600) == 500
    sender.step(LeaderProgress(100, 100), 1650)
    assert sender.wait_ms(1650) == 150
    (heartbeat,) = sender.step(ClockTick(), 1800)
    assert isinstance(heartbeat, Send)
    assert isinstance(heartbeat.message, wire.AppendEntries)
    assert heartbeat.message.confirmed == 100
    assert sender.wait_ms(1800) == 500
