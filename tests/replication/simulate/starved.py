"""Replicas whose processes are short of CPU: each of their steps is seconds late, and all of them live.

Time passes here as on a clock, and a message takes as long as the two processes make it wait. How slow a replica is, is
drawn for each replica, from load to load. Nothing else goes wrong, so that no leader should change for long.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from raymq.actors.supervise.election_peers import CALL_MS_LEAST, CALL_MS_MOST, QUEUED_MAX
from raymq.replication.delays import CallTimeout
from raymq.replication.election import ElectionMachine
from raymq.replication.log_sender import SenderLimits

from .store import Broken
from .world import Node, Packet, World

#: between two ticks of a replica that has all the CPU it needs
TICK_MS = 50
#: how late a step of a replica may be, at most
SLOW_MS = (0, 100, 500, 1_500, 3_000)
#: a machine's load stays for so long
LOAD_MS = 120_000
#: in the first part of it replicas learn how slow they are
LEARN_MS = 60_000
#: of each replica that takes them
PUTS_PER_TICK = 0.5
#: of a leader whose process was killed, to the next one that confirms
FAILOVER_MS = 120_000


class _Call(NamedTuple):
    """One call of a replica by another one, which brings a message of elections."""

    number: int
    begun_ms: int
    packet: Packet


@dataclass(eq=False)
class _Caller:
    """The thread of a replica that calls one other: `actors/supervise/election_peers.py`."""

    timeout: CallTimeout
    waiting: deque[Packet]
    #: the call under way
    call: _Call | None = None


class _Arrived(NamedTuple):
    """A call reaches the other replica. Its caller may have given it up."""

    caller: _Caller
    call: _Call


class _Answered(NamedTuple):
    """The answers of a call are back."""

    caller: _Caller
    call: _Call
    answers: list[Packet]


class _TimedOut(NamedTuple):
    """A call has waited long enough."""

    caller: _Caller
    call: _Call


#: a packet that arrives, the replica whose tick it is, a call that arrives or ends
_Step: TypeAlias = Packet | Node | _Arrived | _Answered | _TimedOut


class _Due(NamedTuple):
    at_ms: int
    number: int
    what: _Step


class Starved:
    """One run: loads one after another. Callers: `run`."""

    def __init__(
        self, seed: int, *, members: int, machine: type[ElectionMachine] = ElectionMachine
    ) -> None:
        self.rng = rng = random.Random(seed)
        self.world = World(members, rng, machine=machine)
        # A follower that is seconds late needs the window of a real stream.
        self.world.limits = SenderLimits()
        self.slow_ms = dict.fromkeys(range(members), 0)
        #: elections in the second parts of all loads, in which nothing was killed
        self.changes = 0
        self.longest_failover_ms = 0
        #: (source, target, connection) -> when its last packet arrives
        self._arrivals: dict[tuple[int, int, int], int] = {}
        #: (source, target) -> the thread that calls
        self._callers = {
            (source, target): _Caller(
                CallTimeout(least_ms=CALL_MS_LEAST, most_ms=CALL_MS_MOST),
                deque(maxlen=QUEUED_MAX),
            )
            for source, target in itertools.permutations(range(members), 2)
        }
        self._due: list[_Due] = []
        self._numbers = itertools.count()
        for node in self.world.nodes:
            self._schedule(0, node)

    def run(self, loads: int) -> None:
        """Raises: Broken for a lost promise, and for a shard that confirms nothing in the second part of a load."""
        world = self.world
        for _ in range(loads):
            # One machine holds all replicas, or each has its own.
            is_one_machine = self.rng.random() < 0.5
            slow_ms = self.rng.choice(SLOW_MS)
            for node in world.nodes:
                self.slow_ms[node.id] = slow_ms if is_one_machine else self.rng.choice(SLOW_MS)
            self.pass_time(LEARN_MS)
            elections, confirmations = world.elections, world.confirmations
            self.pass_time(LOAD_MS - LEARN_MS)
            self.changes += world.elections - elections
            if world.confirmations == confirmations:
                raise Broken(f"nothing was confirmed with replicas that are {self.slow_ms} ms late")
            self.kill_leader()

    def kill_leader(self) -> None:
        """A leader ends, and begins again once another replica leads. Raises: Broken if that takes too long."""
        world = self.world
        leading = [node for node in world.nodes if node.replica is not None and node.replica.leads]
        if not leading:
            return
        (killed,) = leading
        world.stop(killed)
        begun_ms, confirmations = world.now, world.confirmations
        while world.confirmations == confirmations:
            self.pass_time(TICK_MS)
            if world.now - begun_ms > FAILOVER_MS:
                raise Broken(
                    f"no leader after {FAILOVER_MS} ms, replicas are {self.slow_ms} ms late"
                )
        self.longest_failover_ms = max(self.longest_failover_ms, world.now - begun_ms)
        world.start(killed)

    def pass_time(self, ms: int) -> None:
        """All steps that are due in this time."""
        world, until_ms = self.world, self.world.now + ms
        while self._due[0].at_ms <= until_ms:
            due = heapq.heappop(self._due)
            world.now = max(world.now, due.at_ms)
            self._perform(due.what)
        world.now = until_ms

    def _perform(self, what: _Step) -> None:
        """One step that is due, and what is sent in it."""
        if isinstance(what, Node):
            self._tick(what)
        elif isinstance(what, Packet):
            self.world.deliver(what)
        elif isinstance(what, _Arrived):
            self._arrive(what)
        elif what.caller.call is what.call:
            self._end_call(what)
        self._send()

    def _tick(self, node: Node) -> None:
        """One turn of a replica's threads."""
        if node.is_up:
            self.world.sync(node)
            self.world.tick_node(node)
            self.world.put_again(node)
            if self.rng.random() < PUTS_PER_TICK:
                self.world.put(node)
        self._schedule(self.world.now + TICK_MS + self._late_ms(node.id), node)

    def _send(self) -> None:
        """Messages that were just sent are under way. Those of one connection stay in order."""
        packets, self.world.network[:] = list(self.world.network), []
        for packet in packets:
            if packet.connection is None:
                caller = self._callers[packet.source, packet.target]
                caller.waiting.append(packet)
                self._begin_call(caller)
                continue
            stream = packet.source, packet.target, packet.connection
            at_ms = self.world.now + 1 + self._late_ms(packet.target)
            at_ms = max(at_ms, self._arrivals.get(stream, 0))
            self._arrivals[stream] = at_ms
            self._schedule(at_ms, packet)

    # --- calls ------------------------------------------------------------------------------------

    def _begin_call(self, caller: _Caller) -> None:
        """Call with the next message, unless a call is under way."""
        if caller.call is not None or not caller.waiting:
            return
        now_ms = self.world.now
        caller.call = _Call(next(self._numbers), now_ms, caller.waiting.popleft())
        at_ms = now_ms + 1 + self._late_ms(caller.call.packet.target)
        self._schedule(at_ms, _Arrived(caller, caller.call))
        self._schedule(now_ms + caller.timeout.value_ms, _TimedOut(caller, caller.call))

    def _arrive(self, arrived: _Arrived) -> None:
        """The other replica takes the message. Its answers are on their way."""
        packet, network = arrived.call.packet, self.world.network
        self.world.deliver(packet)
        answers = [each for each in network if each.is_answer]
        network[:] = [each for each in network if not each.is_answer]
        at_ms = self.world.now + 1 + self._late_ms(packet.source)
        self._schedule(at_ms, _Answered(*arrived, answers))

    def _end_call(self, ended: _Answered | _TimedOut) -> None:
        caller, took_ms = ended.caller, self.world.now - ended.call.begun_ms
        caller.call = None
        if isinstance(ended, _Answered):
            caller.timeout.note_answer(took_ms)
            for packet in ended.answers:
                self.world.deliver(packet)
        else:
            caller.timeout.note_failure(took_ms)
            caller.waiting.clear()
        self._begin_call(caller)

    def _late_ms(self, replica: int) -> int:
        return int(self.rng.random() * self.slow_ms[replica])

    def _schedule(self, at_ms: int, what: _Step) -> None:
        heapq.heappush(self._due, _Due(at_ms, next(self._numbers), what))


def run_starved(
    seeds: range, *, members: int, loads: int, machine: type[ElectionMachine] = ElectionMachine
) -> tuple[int, int]:
    """Returns: changes of leaders in the second parts of all loads, and the longest failover, ms. Raises: Broken."""
    changes = failover_ms = 0
    for seed in seeds:
        run = Starved(seed, members=members, machine=machine)
        try:
            run.run(loads)
        except Exception as error:
            raise Broken(f"seed {seed}, {members} replicas: {error!r}") from error
        changes += run.changes
        failover_ms = max(failover_ms, run.longest_failover_ms)
    return changes, failover_ms
