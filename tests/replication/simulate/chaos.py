"""Random faults of one seed. At the end everything heals, and then a leader confirms and all logs become equal."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from raymq.replication.election import ElectionMachine
from raymq.replication.election_events import HandOver, LeaderLost
from raymq.replication.log_receiver import LogReceiver
from raymq.replication.quorum import majority, published_end

from .store import Broken, ReplicaStore
from .world import Node, World

#: more virtual time than ten elections take, and a leader without log streams twice between them
HEAL_MS = 60_000


def run_seeds(
    seeds: range,
    *,
    members: int,
    steps: int,
    replaces: bool = False,
    deletes: bool = False,
    grows: int = 0,
    fails_syncs: bool = False,
) -> Counter[str]:
    """Run each seed. Returns: how often everything happened. Raises: Broken, with the command that repeats the run."""
    figures: Counter[str] = Counter()
    for seed in seeds:
        chaos = Chaos(
            seed,
            members=members,
            replaces=replaces,
            deletes=deletes,
            grows=grows,
            fails_syncs=fails_syncs,
        )
        try:
            chaos.run(steps)
        except Exception as error:
            options = f"--seed {seed} --steps {steps} --members {members}"
            options += " --replaces" if replaces else ""
            options += " --deletes" if deletes else ""
            options += f" --grows {grows}" if grows else ""
            options += " --fails-syncs" if fails_syncs else ""
            raise Broken(f"python -m tests.replication.simulate {options}: {error!r}") from error
        world = chaos.world
        figures.update(chaos.faults)
        figures.update(runs=1, steps=steps)
        figures.update(elections=world.elections, confirmations=world.confirmations)
        figures.update(acks=world.acks, duplicates=world.duplicates)
        figures["refused gaps"] += world.refusals
        figures["logs begun later"] += world.begun_later
        figures["ranges copied"] += world.copied
    return figures


class Chaos:
    """One run. The rates of its faults are drawn from the seed, so that some runs are calm and others are not."""

    def __init__(
        self,
        seed: int,
        *,
        members: int = 3,
        machine: type[ElectionMachine] = ElectionMachine,
        receiver: type[LogReceiver] = LogReceiver,
        published: Callable[[int, int, Sequence[int]], int] = published_end,
        store: type[ReplicaStore] = ReplicaStore,
        world: type[World] = World,
        replaces: bool = False,
        deletes: bool = False,
        grows: int = 0,
        fails_syncs: bool = False,
    ) -> None:
        """Args: `replaces`: an operator replaces replicas, and some of the replaced ones still run. `deletes`: replicas
        delete their oldest segments, each at its own time. `grows`: an operator gives a shard of one replica so many.
        `fails_syncs`: syncs fail often, of several replicas at a time, whose processes go on.
        """
        self.rng = rng = random.Random(seed)
        self.world = world(
            members,
            rng,
            flush=rng.choice(["sync", "sync", "async"]),
            is_fresh=rng.random() < 0.2,
            machine=machine,
            receiver=receiver,
            published=published,
            store=store,
        )
        self.world.lost_answers = rng.choice([0.0, 0.1, 0.5])
        #: how often each fault happened
        self.faults: Counter[str] = Counter()
        rate = rng.choice([0.0, 0.3, 1.0, 3.0])
        self.actions: list[Callable[[], None]] = []
        self.weights: list[float] = []
        for action, weight in (
            (self.deliver, 60.0),
            (self.put, 8.0),
            (self.sync, 12.0),
            (self.tick, 12.0),
            (self.lose_packet, rate * rng.random() * 3),
            (self.double_packet, rate * rng.random() * 3),
            (self.kill, rate * rng.random() * 0.5),
            (self.start, 1.0),
            (self.lose_power, rate * rng.random() * 0.3),
            (self.lose_all_power, rate * rng.random() * 0.05),
            (self.lose_disk, rate * rng.random() * 0.2),
            (self.wipe, rate * rng.random() * 0.2),
            (self.fail_sync, rate * rng.random() * 0.1),
            (self.rot, rate * rng.random() * 0.2),
            (self.cut_link, rate * rng.random() * 0.5),
            (self.heal_link, 0.5),
            (self.pause, rate * rng.random() * 0.3),
            (self.resume, 0.5),
            (self.hand_over, rate * rng.random() * 0.2),
            (self.stall_disk, rate * rng.random() * 0.3),
            (self.serve_disk, 0.3),
            (self.stop_streams, rate * rng.random() * 1.0),
            (self.start_streams, 0.5),
            (self.report_leader_ended, rate * rng.random() * 0.3),
            (self.set_clock, 0.2),
            (self.close_server, rate * rng.random() * 0.5),
            (self.open_servers, 0.3),
        ):
            self.actions.append(action)
            self.weights.append(weight)
        if replaces:
            self.actions.append(self.replace)
            self.weights.append(0.3)
        if deletes:
            self.actions.append(self.delete)
            self.weights.append(2.0)
        if fails_syncs:
            self.actions += [self.fail_sync, self.end_failed]
            self.weights += [0.5, 0.2]
        #: the rest of the operator's steps
        self.growth = self.grow_to(grows) if grows else iter(())
        self.is_grown = not grows
        if grows:
            self.actions.append(self.grow)
            self.weights.append(1.0)

    @property
    def members(self) -> int:
        """How many replicas there are now."""
        return len(self.world.nodes)

    def run(self, steps: int) -> None:
        """Faults for so many steps, then healing. Raises: Broken."""
        for action in self.rng.choices(self.actions, self.weights, k=steps):
            action()
        self.heal()

    # --- what goes on -----------------------------------------------------------------------------

    def any_node(self) -> Node:
        return self.rng.choice(self.world.nodes)

    def deliver(self) -> None:
        network = self.world.network
        # More replicas send more packets in the same time.
        for _ in range(max(1, self.members // 2)):
            if network:
                # Mostly in order; messages of elections need none, and connections drop what is out of order.
                at = self.rng.randrange(len(network)) if self.rng.random() < 0.1 else 0
                self.world.deliver(network.pop(at))

    def put(self) -> None:
        self.world.put(self.any_node())

    def sync(self) -> None:
        self.world.sync(self.any_node())
        for node in list(self.world.replaced.values()):
            self.world.sync(node)

    def tick(self) -> None:
        self.world.tick(self.rng.choice([1, 10, 50, 200, 1_000]))

    def hand_over(self) -> None:
        for node in self.world.nodes:
            if not node.is_paused and node.replica is not None and node.replica.leads:
                self.faults["hand-overs"] += 1
                self.world.step(node, HandOver(self.rng.randrange(self.members)))

    # --- faults -----------------------------------------------------------------------------------

    def lose_packet(self) -> None:
        network = self.world.network
        if network:
            self.faults["packets lost"] += 1
            network.pop(self.rng.randrange(len(network)))

    def double_packet(self) -> None:
        network = self.world.network
        if network:
            self.faults["packets doubled"] += 1
            network.append(self.rng.choice(network))

    def kill(self) -> None:
        node = self.any_node()
        if node.is_up:
            self.faults["kills"] += 1
            self.world.stop(node)

    def start(self) -> None:
        node = self.any_node()
        if node.is_up:
            return
        if node.options != self.world.options and self.rng.random() < 0.5:
            # Started by an operator: Ray starts a process with the options that it was made with.
            self.world.make_again(node)
        elif node.incarnation:
            self.world.start(node)

    def may_lose(self, node: Node) -> bool:
        """Whether the fault budget allows this replica to lose data: so few others are not complete."""
        if not self.is_grown:
            # The log of the first one decides. One that is not complete counts for nothing, so that nothing is lost.
            return node.id > 0 and not node.ballot.is_complete
        if self.world.options.candidates == (node.id,):
            # No other replica could lead without its log: `placement.prepare_replica` refuses an empty directory.
            return False
        others = [
            each for each in self.world.nodes if each is not node and not each.ballot.is_complete
        ]
        return len(others) < majority(self.members) - 1

    def lose_power(self) -> None:
        node = self.any_node()
        if self.world.flush == "sync" or self.may_lose(node):
            self.faults["power losses"] += 1
            self.world.lose_power(node)

    def lose_all_power(self) -> None:
        if self.world.flush == "sync":
            self.faults["power losses of all"] += 1
            for node in self.world.nodes:
                self.world.lose_power(node)

    def lose_disk(self) -> None:
        node = self.any_node()
        if self.may_lose(node):
            self.faults["lost disks"] += 1
            self.world.lose_disk(node)

    def wipe(self) -> None:
        """A disk is lost, and the replica starts at once: it gets answers and heartbeats that were under way."""
        node = self.any_node()
        if self.may_lose(node):
            self.faults["lost disks"] += 1
            self.world.lose_disk(node)
            self.world.start(node)

    def replace(self) -> None:
        node = self.any_node()
        if self.may_lose(node):
            self.faults["replaced replicas"] += 1
            self.world.replace(node, still_runs=node.is_up and self.rng.random() < 0.8)

    def grow(self) -> None:
        """An operator does the next step, or has done all."""
        if not self.is_grown:
            next(self.growth, None)
            self.faults["grown shards"] += self.is_grown

    def grow_to(self, replicas: int) -> Iterator[None]:
        """The steps that give a shard of one replica further ones, as `raymq shard set-replicas` does them.

        Safety must not need the order in which processes are made, nor that the new replicas have any of the log.
        """
        world = self.world
        for write_record in (lambda: world.add_replicas(replicas), world.count_all):
            write_record()
            yield
            for number in self.rng.sample(range(replicas), replicas):
                world.make_again(world.nodes[number])
                yield
        self.is_grown = True

    def delete(self) -> None:
        self.faults["deleted segments"] += self.world.delete_first_segment(self.any_node())

    def replace_without_match(self) -> None:
        """An operator replaces a replica that has nothing in common with what the leader has not deleted."""
        for node in list(self.world.nodes):
            for follower, stream in list(node.streams.items()):
                lost = self.world.nodes[follower]
                # One that is not complete counts for nothing, so that nothing is lost with it.
                may_go = not lost.ballot.is_complete or self.may_lose(lost)
                if "nothing in common" in stream.stall_reason and may_go:
                    self.faults["replicas without a match"] += 1
                    self.world.replace(lost, still_runs=False)
                    return

    def fail_sync(self) -> None:
        node = self.any_node()
        if (
            node.is_up
            and not node.is_paused
            and node.failed_end is None
            and (self.world.flush == "sync" or self.may_lose(node))
        ):
            self.faults["failed syncs"] += 1
            self.world.fail_sync(node)

    def end_failed(self) -> None:
        """An operator ends the process of a replica whose sync failed."""
        failed = [each for each in self.world.nodes if each.failed_end is not None and each.is_up]
        if failed:
            self.world.stop(self.rng.choice(failed))

    def rot(self) -> None:
        node = self.any_node()
        if self.may_lose(node):
            self.faults["damaged logs"] += 1
            self.world.rot(node)

    def cut_link(self) -> None:
        self.faults["partitions"] += 1
        source, target = self.rng.randrange(self.members), self.rng.randrange(self.members)
        links = [(source, target)]
        if self.rng.random() < 0.5:
            links.append((target, source))
        if self.rng.random() < 0.3:
            # One replica is alone.
            links = [(source, other) for other in range(self.members)]
            links += [(other, source) for other in range(self.members)]
        self.world.cut_links.update(link for link in links if link[0] != link[1])

    def heal_link(self) -> None:
        self.world.cut_links.clear()

    def close_server(self) -> None:
        """Some or all others cannot call a replica, which goes on to call them."""
        self.faults["closed servers"] += 1
        ids = range(self.members)
        callers = ids if self.rng.random() < 0.5 else self.rng.sample(ids, self.members // 2)
        self.world.close_server(self.any_node(), callers)

    def open_servers(self) -> None:
        self.world.closed_servers.clear()

    def pause(self) -> None:
        self.faults["pauses"] += 1
        self.any_node().is_paused = True

    def resume(self) -> None:
        self.any_node().is_paused = False

    def stall_disk(self) -> None:
        self.faults["stalled disks"] += 1
        self.any_node().is_disk_stalled = True

    def serve_disk(self) -> None:
        self.any_node().is_disk_stalled = False

    def stop_streams(self) -> None:
        """Replication ends or hangs, and the other processes go on."""
        node = self.any_node()
        if node.streams:
            self.faults["stopped Replications"] += 1
            node.is_streaming = False
            node.replication_hangs = self.rng.random() < 0.5
            node.stop_streams()

    def start_streams(self) -> None:
        node = self.any_node()
        if node.is_up and not node.is_paused and not node.is_streaming:
            node.is_streaming = True
            self.world.stream(node)

    def report_leader_ended(self) -> None:
        """Replication says that the leader's process has ended. It may live, or be one that has followed it."""
        node = self.any_node()
        leader = None if node.replica is None or node.is_paused else node.replica.leader
        if node.replica is not None and leader is not None:
            self.faults["leaders reported as ended"] += 1
            self.world.step(node, LeaderLost(leader.id, node.replica.epoch))

    def set_clock(self) -> None:
        """The clock of a replica jumps."""
        self.faults["clock jumps"] += 1
        self.any_node().skew_ms = self.rng.randint(-5_000, 5_000)

    # --- the end ----------------------------------------------------------------------------------

    def heal(self) -> None:
        """All faults end. Raises: Broken unless a leader confirms a new put, and all logs become equal."""
        world = self.world
        world.cut_links.clear()
        world.closed_servers.clear()
        for _ in self.growth:
            pass
        world.stop_replaced()
        world.lost_answers = 0.0
        for node in world.nodes:
            node.is_paused = False
            if node.failed_end is not None or not node.is_up:
                world.start(node)
        for node in world.nodes:
            node.is_disk_stalled = False
        silent = None
        # One fault may stay, and another replica must lead.
        faulty = self.choose_faulty()
        kind = self.rng.choice(["disk", "streams", "server"])
        if faulty is not None and kind == "disk":
            faulty.is_disk_stalled = True
        elif faulty is not None and kind == "server":
            world.close_server(faulty, range(self.members))
        elif faulty is not None:
            silent = faulty
            silent.is_streaming = False
            silent.replication_hangs = self.rng.random() < 0.5
            silent.stop_streams()
        for node in world.nodes:
            if not node.is_streaming and node is not silent:
                node.is_streaming = True
                world.stream(node)

        until = world.now + HEAL_MS
        done = False
        while world.now < until and not done:
            world.tick(50)
            for node in world.nodes:
                world.put_again(node)
            for _ in range(3):
                for packet in self.taken():
                    world.deliver(packet)
                for node in world.nodes:
                    world.sync(node)
            self.replace_without_match()
            done = self.is_healed()
        if not done:
            raise Broken(
                f"not healed after {HEAL_MS} ms: {[self.describe(n) for n in world.nodes]}"
            )

    def choose_faulty(self) -> Node | None:
        """A replica that cannot lead for long: its Replication, its disk or its server does not work; or None."""
        is_complete = all(node.ballot.is_complete for node in self.world.nodes)
        if self.members < 3 or not is_complete or self.rng.random() > 0.2:
            return None
        return self.any_node()

    def taken(self) -> list:
        taken, self.world.network[:] = list(self.world.network), []
        return taken

    def is_healed(self) -> bool:
        world = self.world
        leading = [node for node in world.nodes if node.replica and node.replica.leads]
        if len(leading) != 1 or leading[0].is_disk_stalled:
            return False
        end = leading[0].log.confirmed_end
        if not world.is_called(leading[0]):
            return False
        # A leader sends nothing to one that it cannot call.
        reached = [
            node for node in world.nodes if (leading[0].id, node.id) not in world.closed_servers
        ]
        logs = [node.log for node in reached]
        equal = all(len(log.data) == end and log.equals(bytes(leading[0].log.data)) for log in logs)
        complete = all(node.ballot.is_complete for node in world.nodes)
        is_known = not any(producer.pending for producer in world.producers)
        dispatched = all(node.store.dispatched == end for node in reached)
        is_whole = end == len(leading[0].log.data)
        return complete and equal and is_known and dispatched and is_whole

    @staticmethod
    def describe(node: Node) -> str:
        role = node.replica.state.value if node.replica else "down"
        return f"{node.id} {role} {node.ballot} {len(node.log.data)} confirmed {node.log.confirmed_end}"
