"""Random interleavings of puts, syncs, lost, doubled and reordered frames, restarts and power cuts.

After each step the confirmed end has not fallen, and below it both logs are durable and the same. After healing
everything is confirmed. RAYMQ_SEEDS in the environment sets how many seeds are tried.
"""

from __future__ import annotations

import os
import random

import pytest

from raymq.replication.log_sender import SenderLimits
from tests.support.mirror_world import World

SEEDS = int(os.environ.get("RAYMQ_SEEDS", "600"))
STEPS = 250


class Chaos:
    def __init__(self, seed: int, flush: str) -> None:
        self.rng = random.Random(seed)
        limits = SenderLimits(frame_bytes=300, window_bytes=600, window_frames=3)
        self.world = World(flush=flush, limits=limits)
        self.flush = flush
        self.puts = 0
        self.confirmed = 0

        # Async mode does not promise that confirmed bytes survive a power cut.
        power = [] if flush == "async" else [self.leader_power] * 2 + [self.follower_power] * 2
        self.actions = (
            [self.put] * 14
            + [self.deliver] * 30
            + [self.world.sync_leader] * 6
            + [self.world.sync_follower] * 6
            + [self.tick] * 6
            + [self.drop, self.double, self.double]
            + [self.replication_restart, self.follower_down, self.follower_up, self.follower_up]
            + [self.leader_chain_lost]
            + power
        )

    def run(self) -> None:
        for _ in range(STEPS):
            self.rng.choice(self.actions)()
            self.check()
        self.heal()

    def check(self) -> None:
        world = self.world
        confirmed = world.published
        assert confirmed >= self.confirmed
        self.confirmed = confirmed
        for log in (world.leader_log, world.follower_log):
            assert log.durable() >= confirmed
        assert world.follower_log.confirmed_end <= confirmed
        assert world.leader_log.data[:confirmed] == world.follower_log.data[:confirmed]
        assert not world.follower.halted

    def heal(self) -> None:
        world = self.world
        self.follower_up()
        for _ in range(200):
            world.tick(250)
            world.deliver_all()
            world.sync_leader()
            world.sync_follower()
            self.check()
            if world.published == len(world.leader_log.data):
                break
        assert world.published == len(world.leader_log.data)
        assert world.follower_log.data[: world.published] == world.leader_log.data

    # --- actions ----------------------------------------------------------------------------------

    def put(self) -> None:
        self.puts += 1
        self.world.put(self.puts, self.rng.randint(1, 250))

    def deliver(self) -> None:
        """Deliver a frame, in any order: several old connections may have frames under way."""
        network = self.world.network
        if network:
            at = self.rng.randrange(len(network)) if self.rng.random() < 0.2 else 0
            packet = network[at]
            del network[at]
            self.world.deliver(packet)

    def drop(self) -> None:
        network = self.world.network
        if network:
            del network[self.rng.randrange(len(network))]

    def double(self) -> None:
        network = self.world.network
        if network:
            network.append(self.rng.choice(list(network)))

    def tick(self) -> None:
        self.world.tick(self.rng.choice([1, 50, 200, 300, 6000]))

    def replication_restart(self) -> None:
        self.world.start_leader()

    def leader_power(self) -> None:
        log = self.world.leader_log
        log.lose_power(self.rng.randint(log.synced_end, len(log.data)))
        self.world.start_leader()

    def leader_chain_lost(self) -> None:
        """The cached chain is rebuilt in other units. Only a new leader process sees that."""
        self.world.leader_log.rebuild_chain(0)
        self.world.start_leader()

    def follower_down(self) -> None:
        if self.world.up:
            self.world.stop_follower()

    def follower_up(self) -> None:
        if not self.world.up:
            self.world.start_follower()
            self.world.up = True

    def follower_power(self) -> None:
        self.follower_down()
        log = self.world.follower_log
        log.lose_power(self.rng.randint(log.synced_end, len(log.data)))


@pytest.mark.parametrize("flush", ["sync", "async"])
def test_confirmed_bytes_are_on_both_sides_in_every_interleaving(flush):
    for seed in range(SEEDS):
        try:
            Chaos(seed, flush).run()
        except BaseException:
            print(f"seed {seed}, flush {flush}")
            raise
