"""The network of a shard of three replicas breaks again and again while it is written and read.

Runs at the switch of the network. Its argument is one JSON object: `place`, the directory of the test; `endpoint` and
`token` of the cluster; `rounds`, how many; `network`, the fields of a `Network`. It prints one, whose fields
`tests/ray/test_partitions.py` checks.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import raymq
from raymq.actors.ray.replica_files import read_endpoint
from raymq.store.base.clock import Clock
from raymq.store.base.errors import RayMQError, Unavailable
from tests.support.history import GroupReader, History, Load, Reader, faults
from tests.support.isolated_member import SESSION_S
from tests.support.network_namespaces import Network
from tests.support.replicated_shard import (
    PRODUCERS,
    QUEUES,
    TOPIC,
    ReplicatedShard,
    pause,
    wait_for_leader,
    wait_for_writes,
)
from tests.support.waiting import until

#: what breaks in each round, in turns
KINDS = ("machine", "outbound", "inbound", "link", "follower", "flapping")
#: of these the leader reaches no majority
ISOLATING = KINDS[:3]
#: the producers beside those of the load are numbered from here
ISOLATED = 100
#: longer than a follower waits for a leader before it asks for votes
UNHEARD_S = 2.5
#: a card that flaps: so often, each time for so long without and with the network; then writes must come back
FLAPS, FLAP_S = 4, 0.1
PERIODS = 3


class GentleLoad(Load):
    """One that leaves the processors to the replicas, most of the time."""

    PACE_S = 0.1


class PartitionedShard(ReplicatedShard):
    """Replicas on machines of a network, as the switch sees them."""

    def __init__(self, place: Path, network: Network, endpoint: str, token: str) -> None:
        super().__init__(place, len(network.hosts), {})
        self.network = network
        self.cluster = raymq.connect(f"raymq://{endpoint}", token=token)
        #: not asked: they do not answer, or say that they lead although that is over
        self.cut_off: set[int] = set()

    def status(self, replica: int) -> dict[str, Any]:
        """See ReplicatedShard."""
        if replica in self.cut_off:
            raise Unavailable(f"replica {replica} is cut off")
        return super().status(replica)

    def endpoint(self, replica: int) -> str:
        """host:port of a replica."""
        found = read_endpoint(self.paths.replica(0, replica))
        assert found is not None
        return found

    def machine(self, replica: int) -> str:
        """Where a replica is."""
        host = self.endpoint(replica).rpartition(":")[0]
        return next(name for name, each in self.network.hosts.items() if each == host)

    def is_whole(self) -> bool:
        """Whether all replicas know the same leader of the same epoch, which takes puts."""
        try:
            found = [self.status(each) for each in self.replicas]
        except RayMQError:
            return False
        leaders = {(facts["leader"], facts["epoch"]) for facts in found}
        leading = [facts for facts in found if facts["mode"] == "leader" and facts["writable"]]
        return len(leaders) == len(leading) == 1

    def describe(self) -> dict[int, Any]:
        """What each replica says of itself, for a report of a failure."""
        shown = (
            "mode",
            "epoch",
            "leader",
            "is_complete",
            "appended",
            "synced",
            "confirmed",
            "error",
        )
        said: dict[int, Any] = {}
        for replica in self.replicas:
            try:
                facts = self.status(replica)
                said[replica] = {name: facts[name] for name in shown}
            except RayMQError as error:
                said[replica] = str(error)
        return said


@contextlib.contextmanager
def broken(network: Network, kind: str, leader: str, follower: str) -> Iterator[None]:
    """The network without some links. Args: `leader`, `follower`: machines."""
    others = [each for each in network.hosts if each != leader]
    lost = {
        "outbound": [(leader, each) for each in others],
        "inbound": [(each, leader) for each in others],
        "link": [(leader, follower), (follower, leader)],
    }.get(kind, [])
    unplugged = {"machine": [leader], "follower": [follower]}.get(kind, [])

    for each in unplugged:
        network.unplug(each)
    for sender, receiver in lost:
        network.lose(sender, receiver)
    yield
    for sender, receiver in lost:
        network.deliver(sender, receiver)
    for each in unplugged:
        network.plug(each)


@contextlib.contextmanager
def isolated(
    shard: PartitionedShard, replica: int, program: str, last: str
) -> Iterator[subprocess.Popen[str]]:
    """A client on the machine of a replica, which has an answer from it. Args: `last`: argument of the program."""
    command = [sys.executable, "-m", f"tests.support.{program}"]
    words = [shard.endpoint(replica), shard.cluster.token, TOPIC, last]
    name = shard.network.names[shard.machine(replica)]
    with subprocess.Popen(
        ["ip", "netns", "exec", name, *command, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as client:
        assert client.stdout is not None
        try:
            assert client.stdout.readline(), "the client has ended"
            yield client
        finally:
            client.kill()


def tell(client: subprocess.Popen[str]) -> None:
    """Let an isolated client go on."""
    assert client.stdin is not None
    client.stdin.write("go on\n")
    client.stdin.flush()


def answer_of(client: subprocess.Popen[str]) -> dict[str, Any]:
    """What an isolated client prints at its end."""
    assert client.stdout is not None
    answer = client.stdout.readline()
    assert answer, "the client has ended"
    found: dict[str, Any] = json.loads(answer)
    return found


def take_queues(shard: PartitionedShard, group: str) -> dict[str, Any]:
    """Join a group until all queues are this member's. Returns: when, and where the group was then."""
    with shard.cluster.consumer(
        TOPIC, group=group, start="earliest", session_timeout_s=SESSION_S
    ) as consumer:
        until(lambda: len(consumer.assignment()) == QUEUES, lambda: consumer.poll(1, 0.05))
        return {"taken_ms": Clock().monotonic_ms(), "committed": consumer.committed()}


def isolate_leader(
    shard: PartitionedShard, load: Load, history: History, kind: str, producer: int
) -> dict[str, Any]:
    """Cut the leader off until another one has taken its place and a client beside the old one has its answers."""
    old = wait_for_leader(shard)
    epoch = shard.status(old)["epoch"]
    with (
        isolated(shard, old, "isolated_client", str(producer)) as client,
        isolated(shard, old, "isolated_member", f"g{producer}") as member,
        broken(shard.network, kind, shard.machine(old), ""),
    ):
        shard.cut_off = {old}
        tell(client)
        new = wait_for_leader(shard, but=old)
        wait_for_writes(load)
        during = shard.status(new)["epoch"]
        outcome = answer_of(client)
        taken = take_queues(shard, f"g{producer}")
        tell(member)
        taken["member"] = answer_of(member)
    shard.cut_off = set()

    for _ in range(outcome["sent"]):
        history.send(producer, 0)
    for number, offset in outcome["acked"].items():
        history.ack(producer, 0, int(number), offset)
    return {"before": epoch, "during": during, "isolated": outcome, "taken": taken}


def cut_follower(shard: PartitionedShard, load: Load, kind: str) -> dict[str, Any]:
    """Cut one follower off from the leader, or from all, until it has missed the leader for long enough."""
    leader = wait_for_leader(shard)
    epoch = shard.status(leader)["epoch"]
    follower = (leader + 1) % len(shard.replicas)
    with broken(shard.network, kind, shard.machine(leader), shard.machine(follower)):
        if kind == "link":
            until(lambda: shard.says(follower, lambda facts: facts["leader"] is None), load.pause)
        else:
            # It cannot say so: its answers do not arrive.
            shard.cut_off = {follower}
            load.ended.wait(UNHEARD_S)
        wait_for_writes(load)
        during = shard.status(wait_for_leader(shard))["epoch"]
    shard.cut_off = set()
    return {"before": epoch, "during": during}


def flap(shard: PartitionedShard, load: Load) -> dict[str, Any]:
    """The leader's machine loses and regains the network in quick succession, again and again."""
    leader = wait_for_leader(shard)
    epoch = shard.status(leader)["epoch"]
    for _ in range(PERIODS):
        for _ in range(FLAPS):
            with broken(shard.network, "machine", shard.machine(leader), ""):
                load.ended.wait(FLAP_S)
            load.ended.wait(FLAP_S)
        wait_for_writes(load)
    return {"before": epoch, "during": shard.status(wait_for_leader(shard))["epoch"]}


def play(shard: PartitionedShard, load: Load, isolated: History, turn: int) -> dict[str, Any]:
    """One round: break the network in some way, mend it, and wait until all replicas follow one leader."""
    kind = KINDS[turn % len(KINDS)]
    clock = Clock()
    began_ms = clock.monotonic_ms()
    if kind in ISOLATING:
        facts = isolate_leader(shard, load, isolated, kind, ISOLATED + turn)
    elif kind == "flapping":
        facts = flap(shard, load)
    else:
        facts = cut_follower(shard, load, kind)
    mended_ms = clock.monotonic_ms()
    until(shard.is_whole, load.pause)
    after = shard.status(wait_for_leader(shard))["epoch"]
    whole_ms = clock.monotonic_ms()
    took = {"broken_ms": mended_ms - began_ms, "whole_ms": whole_ms - mended_ms}
    return {"kind": kind, **facts, "after": after, **took}


def run(shard: PartitionedShard, rounds: int) -> dict[str, Any]:
    """Play all rounds under load, and look at what is left."""
    load = GentleLoad(shard.cluster, TOPIC, History(), producers=PRODUCERS, queues=QUEUES)
    isolated = History()
    group = GroupReader(shard.cluster, TOPIC, "g")
    readers = [group, Reader(shard.cluster, TOPIC, read_from="nearest")]
    with load, readers[0], readers[1]:
        wait_for_writes(load)
        played = [play(shard, load, isolated, turn) for turn in range(rounds)]
        load.stop()

        leader = wait_for_leader(shard)
        end = int(shard.status(leader)["appended"])
        until(lambda: shard.says(leader, lambda facts: facts["confirmed"] >= end), pause)
        confirmed = int(shard.status(leader)["confirmed"])
        for each in shard.replicas:
            until(
                lambda each=each: shard.says(each, lambda facts: facts["synced"] >= confirmed),
                pause,
            )
        logs = [shard.commit_log(each, confirmed) for each in shard.replicas]

        reads = list(shard.read(TOPIC))
        until(lambda: all(len(each.got) >= len(reads) or each.failed for each in readers), pause)
        for reader in readers:
            reader.stop()

    found = faults(
        {**load.history.acked(), **isolated.acked()},
        reads,
        {**load.history.sent(), **isolated.sent()},
        seen=[each.got for each in readers],
        committed=[group.committed],
    )
    return {
        "rounds": played,
        "faults": found[:5],
        "messages": len(reads),
        "receipts": load.history.count(),
        "seen": [len(each.got) for each in readers],
        "commits": len(group.committed),
        "confirmed": confirmed,
        "logs": [[len(log), hashlib.sha256(log).hexdigest()] for log in logs],
    }


def main() -> None:
    """Play, and print what came of it."""
    given = json.loads(sys.argv[1])
    network = Network(**given["network"])
    shard = PartitionedShard(Path(given["place"]), network, given["endpoint"], given["token"])
    with shard.cluster:
        try:
            facts = run(shard, given["rounds"])
        except BaseException:
            print(f"the replicas say: {shard.describe()}", file=sys.stderr, flush=True)
            raise
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
