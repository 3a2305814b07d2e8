"""Replicas of one shard in memory. Each step of the world is one event of one replica; invariants hold after each."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from raymq.replication import election_events as r
from raymq.replication import wire
from raymq.replication.election import ElectionMachine
from raymq.replication.election_events import Ballot, ElectionState, LogFacts
from raymq.replication.incarnation import make_incarnation
from raymq.replication.log_copy import LogCopy, LogRange
from raymq.replication.log_receiver import (
    Acknowledge,
    AdoptUnits,
    AdvanceConfirmed,
    AppendUnits,
    BeginAt,
    HaltReplica,
    LogReceiver,
    ReceiverEffect,
    Reply,
    Truncate,
    bytes_of,
)
from raymq.replication.log_sender import (
    ClockTick,
    Connect,
    Connected,
    Disconnect,
    Disconnected,
    FrameReceived,
    LeaderProgress,
    LogSender,
    Phase,
    SenderLimits,
)
from raymq.replication.log_sender import Send as SendFrame
from raymq.replication.quorum import published_end
from raymq.replication.wire import FrameHeader, ReplicaMessage, ReplicaProcess
from raymq.store.log.mending.fitting import SoundBytes
from tests.support.mirror_world import CLUSTER, SEGMENT_BYTES

from .store import (
    EPOCH_RECORD,
    Broken,
    Message,
    ReplicaLog,
    ReplicaStore,
    ShardState,
    whole_end,
)

FRAME_BYTES = 300
#: of one question of a copy
RANGE_BYTES = 200
#: of the producers that send at the same time, the queue of each
PRODUCER_QUEUES = (0, 1, 0, 1)
#: messages of one producer under way
PENDING_MAX = 3
BODY_BYTES_MAX = 200
#: how far an operator's epoch is above those that survivors have heard
EPOCHS_SKIPPED = 1_000


@dataclass(eq=False)
class PendingPut:
    """A put whose outcome its producer does not know."""

    sequence: int
    body: bytes
    #: the highest end that was acknowledged to any producer before this put began
    floor: int


@dataclass(eq=False)
class Producer:
    """A client that numbers its messages, and repeats those whose outcome it does not know, at any leader."""

    id: int
    queue: int
    #: sequence of its next message
    sequence: int = 0
    pending: list[PendingPut] = field(default_factory=list)


class WaitingPut(NamedTuple):
    """A put at a leader, which answers when its log is confirmed up to `end`."""

    producer: Producer
    put: PendingPut
    message: Message
    end: int


@dataclass(eq=False)
class NodeCopy:
    """A copy of another replica's log that one process makes."""

    process: ReplicaProcess
    offer: r.CopyLog
    copy: LogCopy


class CopyStep(NamedTuple):
    """A question of a copy, or its answer."""

    copy: NodeCopy
    message: wire.Probe | LogRange | wire.ProbeReply | SoundBytes


@dataclass
class Packet:
    """A message under way. `connection` is None for those of elections and copies, which need none."""

    source: int
    target: int
    connection: int | None
    event: r.Received | CopyStep | tuple[FrameHeader, ReplicaMessage, bytes | None]
    #: it comes back over the call that brought the question
    is_answer: bool = False


class Options(NamedTuple):
    """What the operator's record says of a shard. A process keeps the options that it was made with."""

    replicas: int
    #: the replicas that count; others only get the log
    voters: tuple[int, ...]
    #: the replicas that may lead; None: all
    candidates: tuple[int, ...] | None = None


@dataclass
class Node:
    """One replica: what is on its disk, and its processes while it is up."""

    id: int
    store: ReplicaStore
    options: Options
    ballot: Ballot = field(default_factory=Ballot)
    incarnation: int = 0
    #: how often this replica had been replaced when its directory was made
    generation: int = 0
    #: the generations of all replicas at that time
    made_with: tuple[int, ...] = ()
    #: the epoch that the operator named then
    made_from: int = 0
    is_up: bool = False
    #: its processes do not run for now; packets wait
    is_paused: bool = False
    replica: ElectionMachine | None = None
    receiver: LogReceiver | None = None
    #: its Replication process works
    is_streaming: bool = True
    #: that process does not work, and has not ended
    replication_hangs: bool = False
    #: follower -> the stream to it, while this replica leads and streams
    streams: dict[int, LogSender] = field(default_factory=dict)
    #: follower -> number of the open connection
    connections: dict[int, int] = field(default_factory=dict)
    puts_stopped: bool = False
    #: end of the EPOCH record of the epoch that it leads, and how far its Replication says that the log is confirmed
    epoch_end: int = 0
    published_end: int = 0
    #: a sync failed at this end: what was not synced then is not on the disk, whatever later syncs say. Its processes
    #: write nothing more, and vote
    failed_end: int | None = None
    #: its disk syncs nothing, and later takes no appends, but forgets nothing
    is_disk_stalled: bool = False
    #: the replicas that it could not call when it tried last
    uncallable: frozenset[int] = frozenset()
    #: by how much its clock is ahead of the true time
    skew_ms: int = 0
    #: (producer id, sequence) -> the put that waits; of a leader
    waiting: dict[tuple[int, int], WaitingPut] = field(default_factory=dict)

    @property
    def log(self) -> ReplicaLog:
        return self.store.log

    @property
    def takes_puts(self) -> bool:
        replica = self.replica
        return (
            replica is not None and replica.leads and not self.puts_stopped and not self.is_paused
        )

    @property
    def is_poisoned(self) -> bool:
        """It writes nothing more after a failed sync. A machine without that rule leads on, and syncs again."""
        leads = self.replica is not None and self.replica.state is ElectionState.LEADER
        return self.failed_end is not None and not leads

    @property
    def process(self) -> ReplicaProcess:
        return ReplicaProcess(self.id, make_incarnation(self.generation, self.incarnation))

    def facts(self) -> LogFacts:
        assert self.receiver is not None
        log, receiver = self.log, self.receiver
        if self.failed_end is not None and self.is_poisoned:
            end = self.failed_end
            epoch = log.epoch_at(end - 1) if end > 0 else 0
            return LogFacts(
                epoch,
                end,
                end,
                is_writable=False,
                can_stream=False,
                uncallable=self.uncallable,
                offered=self.offered,
            )
        matched = receiver.matched_end if receiver.matched else 0
        return LogFacts(
            log.last_epoch,
            len(log.data),
            log.durable(),
            matched,
            receiver.highest_epoch,
            is_writable=not self.is_disk_stalled,
            can_stream=self.is_streaming or self.replication_hangs,
            uncallable=self.uncallable,
        )

    @property
    def offered(self) -> tuple[int, int]:
        """Epoch and end of what others may copy after a failed sync: up to the end of the unit of the last byte."""
        synced = self.failed_end or 0
        for unit in self.log.units:
            if unit.start < synced <= unit.end:
                return self.log.epoch_at(unit.end - 1), unit.end
        return 0, 0

    def first_ballot(self) -> Ballot:
        """That of an empty directory."""
        return Ballot(self.made_from, is_complete=False, generations=self.made_with)

    def stop_streams(self) -> None:
        self.streams, self.connections = {}, {}


class World:
    """All replicas of a shard, the network between them and what must hold of them."""

    def __init__(
        self,
        members: int,
        rng: random.Random,
        *,
        flush: str = "sync",
        is_fresh: bool = False,
        candidates: tuple[int, ...] | None = None,
        machine: type[ElectionMachine] = ElectionMachine,
        receiver: type[LogReceiver] = LogReceiver,
        published: Callable[[int, int, Sequence[int]], int] = published_end,
        store: type[ReplicaStore] = ReplicaStore,
    ) -> None:
        """Args: `is_fresh`: the directories of all replicas are new, and a new one is never complete."""
        self.rng = rng
        self.flush = flush
        self.now = 0
        self.machine = machine
        self.receiver = receiver
        self.published = published
        self.store = store
        self.options = Options(members, tuple(range(members)), candidates)
        self.limits = SenderLimits(frame_bytes=FRAME_BYTES, window_bytes=600, window_frames=3)
        self.network: list[Packet] = []
        self.numbers = 0
        self.cut_links: set[tuple[int, int]] = set()
        #: (caller, target): the caller reaches no server there, and hears the calls of that replica
        self.closed_servers: set[tuple[int, int]] = set()
        #: connection -> its leader and its follower
        self.ends: dict[int, tuple[Node, Node]] = {}
        #: replicas that were replaced and still run, of which packets may reach one in place of its successor
        self.replaced: dict[int, Node] = {}

        #: every byte that was ever confirmed
        self.confirmed = b""
        #: epoch -> the end that its leader has confirmed
        self.confirmed_ends: dict[int, int] = {}
        #: the messages in them
        self.stored = ShardState()
        #: epoch -> its leader
        self.leaders: dict[int, ReplicaProcess] = {}
        self.elections = self.confirmations = self.begun_later = self.copied = 0

        self.producers = [Producer(number, queue) for number, queue in enumerate(PRODUCER_QUEUES)]
        self.producer_count = len(self.producers)
        #: (producer id, sequence) -> the body that the producer sent
        self.sent: dict[tuple[int, int], bytes] = {}
        #: the highest end of a message that was acknowledged
        self.acked_end = 0
        #: the share of answers to puts that are lost
        self.lost_answers = 0.0
        self.acks = self.duplicates = self.refusals = 0

        ballot = Ballot(is_complete=not is_fresh)
        self.nodes = [
            Node(number, self.new_store(), self.options, ballot) for number in range(members)
        ]
        for node in self.nodes:
            self.start(node)

    def new_store(self) -> ReplicaStore:
        """That of an empty directory."""
        return self.store(ReplicaLog(flush=self.flush))

    def next_number(self) -> int:
        self.numbers += 1
        return self.numbers

    # --- processes --------------------------------------------------------------------------------

    def start(self, node: Node) -> None:
        if node.failed_end is not None:
            # The store is opened again only after its machine has stopped.
            self.lose_power(node)
        node.incarnation = self.next_number()
        node.is_up, node.is_paused, node.is_streaming, node.puts_stopped = True, False, True, False
        members = sorted({*node.options.voters, node.id})
        node.replica = self.machine(
            node.process, members, node.ballot, candidates=node.options.candidates
        )
        node.receiver = self.receiver(cluster=CLUSTER, shard=0, me=node.process, leader_id=None)
        node.store.recover()
        node.stop_streams()

    def stop(self, node: Node) -> None:
        """Kill all processes. The page cache keeps what was written."""
        node.is_up = False
        node.replica = node.receiver = None
        node.waiting.clear()
        node.stop_streams()
        for other in [*self.nodes, *self.replaced.values()]:
            connection = other.connections.get(node.id)
            if connection is not None and self.ends[connection][1] is node:
                self.disconnect(other, node.id)

    def close_server(self, target: Node, callers: Sequence[int]) -> None:
        """From now on these replicas cannot call that one, as with a certificate that they do not accept."""
        for caller in callers:
            if caller == target.id:
                continue
            self.closed_servers.add((caller, target.id))
            for each in (self.nodes[caller], self.replaced.get(caller)):
                if each is not None and target.id in each.connections:
                    self.disconnect(each, target.id)

    def is_called(self, node: Node) -> bool:
        """Whether a majority can call a replica. Then its clients can, too."""
        callers = [each for each in self.nodes if (each.id, node.id) not in self.closed_servers]
        return len(callers) > len(self.nodes) // 2

    def replace(self, node: Node, *, still_runs: bool, least_epoch: int = 0) -> None:
        """An operator gives a replica's place to a new, empty one. Args: `still_runs`: the old one does not end."""
        earlier = self.replaced.pop(node.id, None)
        for old in (earlier, None if still_runs else node):
            if old is not None and old.is_up:
                self.stop(old)
        if still_runs:
            self.replaced[node.id] = node
        new = Node(node.id, self.new_store(), self.options, generation=node.generation + 1)
        self.nodes[node.id] = new
        new.made_with = self.generations()
        new.made_from = least_epoch
        new.ballot = new.first_ballot()
        self.start(new)

    def add_replicas(self, replicas: int) -> None:
        """An operator gives a shard of one replica further ones, which get its log and do not count yet.

        Their processes are not made yet.
        """
        self.options = Options(replicas, voters=(0,), candidates=(0,))
        added = [
            Node(number, self.new_store(), self.options, generation=1)
            for number in range(1, replicas)
        ]
        self.nodes += added
        for node in added:
            node.made_with = self.generations()
            node.ballot = node.first_ballot()

    def count_all(self) -> None:
        """The second step of `add_replicas`: every process that is made from now on counts all replicas."""
        replicas = len(self.nodes)
        # Of two replicas the first one always leads.
        candidates = (0,) if replicas == 2 else None
        self.options = Options(replicas, tuple(range(replicas)), candidates)

    def make_again(self, node: Node) -> None:
        """Make the processes of a replica with the operator's present options, unless they have them."""
        if node.is_up and node.options == self.options:
            return
        if node.is_up:
            self.stop(node)
        node.options = self.options
        node.ballot = node.ballot.with_generations(self.generations())
        self.start(node)

    def counts(self, node: Node, follower: int) -> bool:
        """Whether what a follower acknowledges counts for this leader."""
        return follower in node.options.voters

    def recover_unclean(self, survivors: Sequence[int]) -> int:
        """An operator gives up all other replicas, which have ended. Returns: how many confirmed bytes are lost."""
        kept = [self.nodes[each] for each in survivors]
        for node in self.nodes:
            if node not in kept and node.is_up:
                self.stop(node)
        for node in kept:
            # What only the lost ones had synced is not lost before the next power loss.
            if node.failed_end is None:
                node.log.sync()
            else:
                self.lose_power(node)
        best = max(kept, key=lambda node: (node.log.last_epoch, len(node.log.data))).log
        both = min(len(best.data), len(self.confirmed))
        while not best.equals(self.confirmed[:both]):
            both -= 1
        lost = len(self.confirmed) - both
        if lost:
            self.forget_lost(whole_end(self.confirmed, both))

        epoch = max(node.ballot.epoch for node in kept) + EPOCHS_SKIPPED
        for node in [node for node in self.nodes if node not in kept]:
            self.replace(node, still_runs=False, least_epoch=epoch)
        return lost

    def forget_lost(self, end: int) -> None:
        """What was confirmed after `end` is lost. Producers whose sequences have a gap now begin anew."""
        self.confirmed = self.confirmed[:end]
        self.confirmed_ends = {epoch: min(each, end) for epoch, each in self.confirmed_ends.items()}
        self.stored.cut(end)
        self.acked_end = min(self.acked_end, end)
        for producer in list(self.producers):
            self.begin_producer(producer)

    def generations(self) -> tuple[int, ...]:
        """Those that the operator knows, who gives them to each new replica."""
        return tuple(node.generation for node in self.nodes)

    def stop_replaced(self) -> None:
        for node in self.replaced.values():
            if node.is_up:
                self.stop(node)
        self.replaced = {}

    def reached(self, replica: int) -> Node:
        """The node that a message to a replica reaches."""
        old = self.replaced.get(replica)
        return self.nodes[replica] if old is None or self.rng.random() < 0.5 else old

    def lose_power(self, node: Node) -> None:
        """The machine stops: any part of what was not synced is gone, with the confirmed end that was not synced."""
        self.stop(node)
        log = node.log
        if node.failed_end is not None:
            log.synced_end, node.failed_end = min(log.synced_end, node.failed_end), None
        log.lose_power(self.rng.randint(log.synced_end, len(log.data)))
        log.confirmed_end = min(log.confirmed_end, log.synced_end)
        log.synced_end = len(log.data)
        if self.flush == "async":
            # Confirmed bytes were not synced: the log may lack them.
            node.ballot = node.ballot._replace(is_complete=False)

    def lose_disk(self, node: Node) -> None:
        """Everything is gone, the ballot too. A fresh directory is never complete."""
        self.stop(node)
        node.store, node.failed_end = self.new_store(), None
        if len(self.nodes) == 2:
            # Of two replicas only an operator makes an empty one: with a process of a replaced replica, which may still
            # run, it would be all that an election asks.
            node.made_with = self.generations()
        # Only the operator's record is left of what it knew, as of the time when this replica was made.
        node.ballot = node.first_ballot()

    def fail_sync(self, node: Node) -> None:
        """A sync fails. A leader steps down, and the processes write nothing more."""
        log = node.log
        is_kept = log.synced_end >= log.durable()
        if node.failed_end is None:
            node.failed_end = log.synced_end
        self.step(node, r.OwnSyncFailed(is_complete=is_kept))
        if node.is_poisoned and self.rng.random() < 0.5:
            self.lose_power(node)

    def rot(self, node: Node) -> None:
        """Recovery finds a damaged record below the synced end: the log ends there, and that is known."""
        self.stop(node)
        log = node.log
        if not log.is_empty():
            cut = self.rng.randint(log.start, len(log.data) - 1)
            log.confirmed_end = min(log.confirmed_end, cut)
            log.truncate_unchecked(cut)
            log.rebuild_chain(cut // SEGMENT_BYTES * SEGMENT_BYTES)
            log.synced_end = min(log.synced_end, len(log.data))
            log.confirmed_end = min(log.confirmed_end, len(log.data))
        node.ballot = node.ballot._replace(is_complete=False)

    # --- events -----------------------------------------------------------------------------------

    def step(self, node: Node, event: r.ElectionEvent, *, caller: int | None = None) -> None:
        """Args: `caller`: the replica whose call brought the event, and takes the answers."""
        replica = node.replica
        assert replica is not None
        before, confirmed = replica.ballot.epoch, replica.confirmed
        effects = replica.step(event, self.now, node.facts())
        has_confirmed = replica.confirmed > confirmed
        self.perform(node, effects, caller)
        if has_confirmed:
            self.confirm(node, replica.confirmed)
        if node.replica is replica and replica.ballot.epoch < before:
            raise Broken(f"replica {node.id} served epoch {before}, then {replica.ballot.epoch}")

    def perform(
        self, node: Node, effects: list[r.ElectionEffect], caller: int | None = None
    ) -> None:
        for effect in effects:
            if isinstance(effect, r.Persist):
                node.ballot = effect.ballot
            elif isinstance(effect, r.SendElection):
                event = r.Received(node.process, effect.addressee, effect.epoch, effect.message)
                to = effect.addressee.id
                self.network.append(Packet(node.id, to, None, event, is_answer=to == caller))
            elif isinstance(effect, r.BeginEpoch):
                self.begin_epoch(node, effect.epoch)
            elif isinstance(effect, r.StepDown):
                node.stop_streams()
                node.puts_stopped = False
                # Their outcomes are unknown.
                node.waiting.clear()
            elif isinstance(effect, r.StopPuts):
                node.puts_stopped = True
            elif isinstance(effect, r.ResumePuts):
                node.puts_stopped = False
            elif isinstance(effect, r.CopyLog):
                self.begin_copy(node, effect)

    def begin_epoch(self, node: Node, epoch: int) -> None:
        self.elections += 1
        known = self.leaders.setdefault(epoch, node.process)
        if known != node.process:
            raise Broken(f"epoch {epoch} has the leaders {known} and {node.process}")
        # A leader that is elected late, after one of a later epoch, confirms nothing.
        ends = [end for before, end in self.confirmed_ends.items() if before < epoch]
        needed = self.confirmed[: max(ends, default=0)]
        if len(node.log.data) < len(needed) or not node.log.equals(needed):
            raise Broken(f"leader {node.id} of epoch {epoch} lacks confirmed bytes")

        assert node.receiver is not None
        node.receiver.leave()
        node.store.begin_epoch()
        node.log.complete_chain()
        node.epoch_end = node.log.put(EPOCH_RECORD % epoch, epoch)
        node.published_end = 0
        self.stream(node)
        self.step(node, r.EpochBegun(epoch, node.epoch_end))
        self.progress(node)

    def stream(self, node: Node) -> None:
        """Start the streams of a leader: its Replication is a process of its own, which names the same replica."""
        node.stop_streams()
        if node.replica is None or node.replica.state is not ElectionState.LEADER:
            return
        me = ReplicaProcess(node.id, make_incarnation(node.generation, self.next_number()))
        for other in self.nodes:
            if other.id != node.id and other.id < node.options.replicas and node.is_streaming:
                node.streams[other.id] = LogSender(
                    cluster=CLUSTER,
                    shard=0,
                    me=me,
                    follower_id=other.id,
                    chain=node.log,
                    segment_size_bytes=SEGMENT_BYTES,
                    epoch=node.replica.epoch,
                    confirmed=node.log.confirmed_end,
                    generation=node.ballot.generation(other.id),
                    limits=self.limits,
                )

    def publish(self, node: Node) -> None:
        """Confirm what Replication sees of its streams and of the leader's flusher, as a live leader does."""
        replica = node.replica
        if replica is None or not replica.leads or not node.is_streaming:
            return
        ends = [
            stream.replicated_end if stream.is_complete else 0
            for follower, stream in node.streams.items()
            if self.counts(node, follower)
        ]
        end = self.published(node.epoch_end, node.log.durable(), ends)
        if end <= node.published_end:
            return
        node.published_end = end
        if end > replica.confirmed:
            # The machine hears of a sync with its next event, for example this one for a second time.
            self.step(node, r.EpochBegun(replica.epoch, node.epoch_end))
        if end > replica.confirmed:
            raise Broken(f"replica {node.id} publishes {end}, and confirmed {replica.confirmed}")
        self.confirm(node, end)

    def confirm(self, node: Node, end: int) -> None:
        """The leader's log is confirmed up to an end: it extends what was confirmed, and changes none of it."""
        log = node.log
        log.advance_confirmed(end)
        assert node.replica is not None
        self.confirmed_ends[node.replica.epoch] = end
        if not log.equals(self.confirmed[:end]):
            raise Broken(f"replica {node.id} confirms other bytes than were confirmed before")
        if end > len(self.confirmed):
            self.confirmed += bytes(log.data[len(self.confirmed) : end])
            self.confirmations += 1
            self.check_messages()
        if node.waiting:
            self.answer(node)

    def check_messages(self) -> None:
        """The messages that were just confirmed are ones that producers sent, each once and in order.

        Their queue offsets have no gap, and store times do not go back.
        """
        stored = self.stored
        known, time_ms = len(stored.messages), stored.store_time_ms
        stored.apply(self.confirmed, len(self.confirmed))
        for message in stored.messages[known:]:
            key = message.producer, message.sequence
            if self.sent.get(key) != message.body:
                raise Broken(f"{message} is confirmed, and no producer sent it")
            of_producer = stored.by_producer[message.producer]
            if message.sequence >= len(of_producer) or of_producer[message.sequence] != message:
                raise Broken(f"{message} is confirmed twice, or in another order than it was sent")
            of_queue = stored.by_queue[message.queue]
            if message.queue_offset >= len(of_queue) or of_queue[message.queue_offset] != message:
                raise Broken(f"{message} has another queue offset than its place in the queue")
            if message.store_time_ms < time_ms:
                raise Broken(f"{message} was stored before the message before it")
            time_ms = message.store_time_ms

    def check_confirmed(self, node: Node) -> None:
        """Readers of any replica see only confirmed bytes."""
        end = node.log.confirmed_end
        if end > len(self.confirmed) or not node.log.equals(self.confirmed[:end]):
            raise Broken(f"replica {node.id} shows bytes that were not confirmed")

    # --- puts -------------------------------------------------------------------------------------

    def put(self, node: Node) -> None:
        """A producer sends a message to a replica, its next one or one whose outcome it does not know."""
        if not node.takes_puts or not self.is_called(node):
            return
        producer = self.rng.choice(self.producers)
        pending = producer.pending
        if not pending or (len(pending) < PENDING_MAX and self.rng.random() < 0.7):
            body = bytes([self.rng.randint(1, 250)]) * self.rng.randint(0, BODY_BYTES_MAX)
            self.sent[producer.id, producer.sequence] = body
            pending.append(PendingPut(producer.sequence, body, self.acked_end))
            producer.sequence += 1
            self.send(node, producer, pending[-1])
        else:
            self.send(node, producer, self.rng.choice(pending))

    def put_again(self, node: Node) -> None:
        """All producers send everything again whose outcome they do not know."""
        for producer in list(self.producers):
            for put in list(producer.pending):
                if node.takes_puts and self.is_called(node):
                    self.send(node, producer, put)

    def send(self, node: Node, producer: Producer, put: PendingPut) -> None:
        """A leader takes a put: it stores the message, or finds it in its log, or refuses a gap."""
        store = node.store
        known = store.known(producer.id)
        if not store.admits(put.sequence, known):
            self.refusals += 1
            return
        if put.sequence < len(known):
            self.duplicates += 1
            message, end = known[put.sequence], known[-1].end
        else:
            assert node.replica is not None
            clock_ms, epoch = max(0, self.now + node.skew_ms), node.replica.epoch
            message = store.append(
                producer.id, put.sequence, producer.queue, put.body, clock_ms=clock_ms, epoch=epoch
            )
            end = message.end
        node.waiting[producer.id, put.sequence] = WaitingPut(producer, put, message, end)
        self.answer(node)
        self.progress(node)

    def answer(self, node: Node) -> None:
        """Answer the puts whose messages are confirmed. Some answers are lost."""
        end = node.store.acknowledged_end()
        for key, waiting in list(node.waiting.items()):
            if waiting.end <= end:
                del node.waiting[key]
                if not self.lost_answers or self.rng.random() >= self.lost_answers:
                    self.acknowledge_put(waiting)

    def acknowledge_put(self, waiting: WaitingPut) -> None:
        """A producer hears where its message is. Raises: Broken unless it is there, after all that came before."""
        producer, put, message, _ = waiting
        stored = self.stored.by_producer[producer.id]
        if put.sequence >= len(stored) or stored[put.sequence] != message:
            raise Broken(f"{message} is acknowledged, and not confirmed at that place")
        if put not in producer.pending:
            return
        if message.start < put.floor:
            raise Broken(f"{message} was sent after the ack of a message that ends at {put.floor}")
        self.acks += 1
        self.acked_end = max(self.acked_end, message.end)
        producer.pending.remove(put)
        if not producer.pending and self.rng.random() < 0.2:
            self.begin_producer(producer)

    def begin_producer(self, former: Producer) -> None:
        """A new producer takes the place of one that ends."""
        new = Producer(self.producer_count, former.queue)
        self.producer_count += 1
        self.producers[self.producers.index(former)] = new

    def dispatch(self, node: Node) -> None:
        """A replica dispatches what it knows as confirmed."""
        if node.store.dispatched < node.store.dispatch_end():
            node.store.dispatch(self.stored)

    # --- disks ------------------------------------------------------------------------------------

    def sync(self, node: Node) -> None:
        if not node.is_up or node.is_paused or node.is_poisoned:
            return
        if not node.is_disk_stalled:
            durable = node.log.durable()
            node.log.sync()
            if node.log.durable() > durable:
                self.acknowledge(node)
                self.publish(node)
            self.progress(node)

    def delete_first_segment(self, node: Node) -> bool:
        """Retention deletes the oldest segment of a replica. Returns: False if it is needed."""
        log = node.log
        stop = log.start + SEGMENT_BYTES
        if stop > min(log.confirmed_end, log.synced_end) or stop == len(log.data):
            return False
        if not any(unit.end == stop for unit in log.units):
            return False
        log.delete_first_segment()
        return True

    def tick(self, ms: int) -> None:
        self.now += ms
        for node in [*self.nodes, *self.replaced.values()]:
            if node.is_up and not node.is_paused:
                self.tick_node(node)

    def tick_node(self, node: Node) -> None:
        # Each replica tries to call the others from time to time.
        closed = [target for caller, target in self.closed_servers if caller == node.id]
        node.uncallable = frozenset(closed)
        if node.is_poisoned:
            return
        self.step(node, r.ElectionTick(self.rng.random()))
        self.dispatch(node)
        for follower in list(node.streams):
            self.step_stream(node, follower, ClockTick())

    # --- streams ----------------------------------------------------------------------------------

    def progress(self, node: Node) -> None:
        for follower in list(node.streams):
            log = node.log
            # The protocol does not say which followers may get bytes late: any may, at any time.
            may_linger = (self.now // 50 + follower) % 2 == 0
            progress = LeaderProgress(len(log.data), log.confirmed_end, may_linger)
            self.step_stream(node, follower, progress)

    def step_stream(self, node: Node, follower: int, event: object) -> None:
        stream = node.streams.get(follower)
        if stream is None:
            return
        for effect in stream.step(event, self.now):  # type: ignore[arg-type]
            if isinstance(effect, SendFrame):
                connection = node.connections.get(follower)
                if connection is not None:
                    body = bytes(node.log.data[effect.start : effect.stop]) or None
                    frame = (effect.header, effect.message, body)
                    self.network.append(Packet(node.id, follower, connection, frame))
            elif isinstance(effect, Connect):
                target = self.reached(follower)
                link = node.id, follower
                if target.is_up and link not in self.cut_links | self.closed_servers:
                    node.connections[follower] = number = self.next_number()
                    self.ends[number] = node, target
                    self.step_stream(node, follower, Connected(node.log.start))
                else:
                    self.step_stream(node, follower, Disconnected("no answer"))
            elif isinstance(effect, Disconnect):
                node.connections.pop(follower, None)

    def disconnect(self, node: Node, follower: int) -> None:
        node.connections.pop(follower, None)
        self.step_stream(node, follower, Disconnected("cut"))

    def deliver(self, packet: Packet) -> None:
        """A packet arrives, unless its target is down, its link is cut, or its connection is gone."""
        if packet.connection is None:
            target = self.reached(packet.target)
        else:
            leader, follower = self.ends[packet.connection]
            target = follower if packet.target == follower.id else leader
        if not target.is_up or (packet.source, packet.target) in self.cut_links:
            return
        if packet.connection is None:
            pair = packet.source, packet.target
            if (pair[::-1] if packet.is_answer else pair) in self.closed_servers:
                return
        if target.is_paused:
            self.network.append(packet)
        elif isinstance(packet.event, r.Received):
            caller = None if packet.is_answer else packet.source
            self.step(target, packet.event, caller=caller)
        elif isinstance(packet.event, CopyStep):
            self.take_copy_step(target, packet.source, packet.event)
        elif target.connections.get(packet.source) == packet.connection:
            header, message, _ = packet.event
            self.take_answer(target, packet.source, header, message)
        elif leader.connections.get(packet.target) == packet.connection:
            header, message, body = packet.event
            self.take_frame(target, packet.source, packet.connection, header, message, body)

    def take_answer(
        self, leader: Node, follower: int, header: FrameHeader, message: ReplicaMessage
    ) -> None:
        """An answer reaches the leader's stream. An ack, or a higher epoch, reaches its replica too."""
        replica, stream = leader.replica, leader.streams.get(follower)
        if replica is None or stream is None:
            return
        if header.epoch > replica.epoch:
            fact = r.Received(header.sender, leader.process, header.epoch, wire.NewerEpoch())
            self.step(leader, fact)
            return
        self.step_stream(leader, follower, FrameReceived(header, message))
        if not isinstance(message, wire.Ack) or stream.phase is not Phase.STREAMING:
            return
        if self.counts(leader, follower):
            heard = r.FollowerHeard(
                follower, header.epoch, stream.replicated_end, message.is_complete
            )
            self.step(leader, heard)
        self.publish(leader)
        self.progress(leader)

    def take_frame(
        self,
        node: Node,
        leader: int,
        connection: int | None,
        header: FrameHeader,
        message: ReplicaMessage,
        body: bytes | None,
    ) -> None:
        """A frame of a leader: the replica admits it or not, then the receiver stores its bytes."""
        replica, receiver, log = node.replica, node.receiver, node.log
        if replica is None or receiver is None or node.is_poisoned:
            return

        def answer(header: FrameHeader, message: ReplicaMessage) -> None:
            self.network.append(Packet(node.id, leader, connection, (header, message, None)))

        if not replica.follows(header.sender, header.epoch):
            self.step(node, r.LeaderHeard(header.sender, header.epoch))
        if not replica.admits(header.sender, header.epoch):
            text = f"epoch {header.epoch} is over"
            refusal = wire.Refusal(wire.Reason.EPOCH, replica.epoch, text)
            reply = header._replace(
                sender=node.process, addressee=header.sender, epoch=replica.epoch
            )
            answer(reply, refusal)
            return

        data = None if body is None else memoryview(body)
        for reply in self.change(node, receiver.step(header, message, data, log), data):
            answer(receiver.header(), reply)

    def change(
        self, node: Node, effects: list[ReceiverEffect], data: memoryview | None
    ) -> Iterator[ReplicaMessage]:
        """Perform the effects of a receiver. Yields: the replies."""
        log = node.log
        for effect in effects:
            if isinstance(effect, AppendUnits | AdoptUnits):
                units = list(effect.units)
                assert data is not None
                store = log.append_units if isinstance(effect, AppendUnits) else log.adopt_units
                store(units, bytes_of(effect.units, data))
            elif isinstance(effect, Truncate):
                node.store.truncate(effect)
            elif isinstance(effect, BeginAt):
                log.begin_at(effect.start, effect.chain_value)
                # What is deleted is in no comparison; epochs of it are known from a snapshot.
                node.store.begin_at(self.confirmed[: effect.start])
                self.begun_later += effect.start > 0
            elif isinstance(effect, AdvanceConfirmed):
                log.advance_confirmed(effect.confirmed)
                self.check_confirmed(node)
            elif isinstance(effect, HaltReplica):
                raise Broken(f"replica {node.id} halts: {effect.reason}")
            elif isinstance(effect, Acknowledge):
                self.acknowledge(node)
            elif isinstance(effect, Reply):
                yield effect.message

    # --- copies -----------------------------------------------------------------------------------

    def begin_copy(self, node: Node, offer: r.CopyLog) -> None:
        """A replica copies a log that cannot lead. Another copy of it may be under way."""
        log = node.log
        copy = LogCopy(
            log,
            len(log.data),
            offer.recency,
            log_start=log.start,
            segment_size_bytes=SEGMENT_BYTES,
            range_bytes=RANGE_BYTES,
        )
        self.ask_for_copy(node, NodeCopy(node.process, offer, copy))

    def ask_for_copy(self, node: Node, copy: NodeCopy) -> None:
        question = copy.copy.question
        if question is not None:
            step = CopyStep(copy, question)
            self.network.append(Packet(node.id, copy.offer.source.id, None, step))

    def take_copy_step(self, node: Node, source: int, step: CopyStep) -> None:
        """A question reaches the source of a copy, or an answer the process that makes it."""
        copy, message = step
        if isinstance(message, wire.Probe | LogRange):
            answer = self.answer_copy(node, message)
            if answer is not None:
                packet = Packet(node.id, source, None, CopyStep(copy, answer), is_answer=True)
                self.network.append(packet)
            return
        if node.process != copy.process or node.is_poisoned:
            return

        if isinstance(message, wire.ProbeReply):
            copy.copy.take_match(*message)
        else:
            units = copy.copy.take_range(message)
            if units is not None and not self.take_copied(node, copy.offer, *units):
                return
        self.ask_for_copy(node, copy)

    def answer_copy(
        self, node: Node, question: wire.Probe | LogRange
    ) -> wire.ProbeReply | SoundBytes | None:
        """What a replica gives of its log: what it had synced, if a sync has failed, else what is confirmed."""
        log = node.log
        end = min(log.synced_end, log.confirmed_end)
        if node.failed_end is not None:
            end = node.offered[1]
        if isinstance(question, wire.Probe):
            held = [
                index
                for index, (offset, value) in enumerate(question.candidates)
                if offset <= end and log.chain_value_at(offset) == value
            ]
            return wire.ProbeReply(max(held, default=-1), question.candidates[-1][0])
        start, stop = question
        if start < log.start or stop > end:
            return None
        units = [unit for unit in log.units if unit.start < stop and start < unit.end]
        return SoundBytes(start, bytes(log.data[start:stop]), units)

    def take_copied(
        self, node: Node, offer: r.CopyLog, message: wire.AppendEntries, data: memoryview
    ) -> bool:
        """Store what was copied. Returns: whether the copy goes on."""
        replica, receiver, log = node.replica, node.receiver, node.log
        assert replica is not None
        assert receiver is not None
        if not replica.may_copy(offer.recency, (log.last_epoch, len(log.data))):
            return False
        effects = receiver.copy(offer.source, replica.epoch, message, data, log)
        replies = list(self.change(node, effects, data))
        self.copied += not replies
        return not replies

    def acknowledge(self, node: Node) -> None:
        """Send the follower's ack to the leader of its session."""
        receiver, replica = node.receiver, node.replica
        if receiver is None or replica is None or not receiver.matched:
            return
        header = receiver.header()
        if not replica.admits(header.addressee, header.epoch):
            return
        leader = header.addressee.id
        for each in (self.nodes[leader], self.replaced.get(leader)):
            connection = None if each is None else each.connections.get(node.id)
            if connection is not None and self.ends[connection][1] is node:
                ack = receiver.acknowledge(node.log, is_complete=replica.ballot.is_complete)
                self.network.append(Packet(node.id, leader, connection, (header, ack, None)))
