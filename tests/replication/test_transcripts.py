"""Runs the transcripts beside this file: command, line, exact outcome.

A block is `> command arguments`, then what it prints, then an empty line. `#` begins a comment.
With RAYMQ_REWRITE_TRANSCRIPTS=1 in the environment the outcomes are written instead of compared:
read the difference before you keep it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from raymq.replication.combiner import PutCombiner
from raymq.store.base.checksum import crc32c
from raymq.store.config.promise import PROMISES, Ends
from raymq.store.log.chain import ChainUnit
from tests.support.mirror_world import Packet, World

HERE = Path(__file__).parent
REWRITE = os.environ.get("RAYMQ_REWRITE_TRANSCRIPTS") == "1"


class CombinerScript:
    """promise FLUSH single|mirror ACKS; put NUMBER END, synced END, replicated END, tick NOW_MS.

    The time-outs are RocketMQ's: 5000 ms for the flush, 3000 ms for the replica.
    """

    def __init__(self) -> None:
        self.run(["promise", "sync", "mirror", "quorum"])

    def run(self, words: list[str]) -> list[str]:
        name, arguments = words[0], words[1:]
        if name == "promise":
            flush, replicas, acks = arguments
            self.combiner = PutCombiner(
                PROMISES[flush, replicas == "mirror", acks],
                flush_timeout_ms=5000,
                replica_timeout_ms=3000,
            )
            self.ends, self.now = Ends(0, 0, 0, 0), 0
            self.waiting: dict[int, int] = {}
        elif name == "put":
            number, end = map(int, arguments)
            self.ends = self.ends._replace(
                appended=max(self.ends.appended, end), committed=max(self.ends.committed, end)
            )
            self.waiting[number] = end
            self.combiner.add(number, end, self.now)
        elif name == "tick":
            self.now = int(arguments[0])
        else:
            self.ends = self.ends._replace(**{name: int(arguments[0])})

        lines = list(self.outcomes())
        return [*lines, f"waiting: {' '.join(map(str, self.waiting)) or 'none'}"]

    def outcomes(self) -> Iterator[str]:
        """The answers that CommitLog gives: success by the watermark, exceptions by entry."""
        late = self.combiner.combine(self.ends, self.now)
        for number, end in list(self.waiting.items()):
            if end <= self.combiner.acknowledged:
                yield f"put {number}: PUT_OK"
                del self.waiting[number]
        for entry in late:
            for number, end in list(self.waiting.items()):
                if number <= entry.number and end <= entry.end:
                    yield f"put {number}: {entry.status.value}"
                    del self.waiting[number]


class MirrorScript:
    """Commands of the mirror's transcripts: one method each."""

    def __init__(self) -> None:
        self.world = World()
        self.kept: list[Packet] = []

    def run(self, words: list[str]) -> list[str]:
        getattr(self, "_".join(words[:1]).replace("-", "_"))(*words[1:])
        lines, self.world.trace = self.world.trace, []
        return lines or ["ok"]

    def world_of(self, flush: str) -> None:
        """Start over in another flush mode."""
        self.world = World(flush=flush)

    def put(self, sequence: str, size: str) -> None:
        self.world.put(int(sequence), int(size))

    def sync(self, who: str) -> None:
        if who in ("leader", "both"):
            self.world.sync_leader()
        if who in ("follower", "both"):
            self.world.sync_follower()

    def deliver(self, count: str = "all") -> None:
        """Deliver all frames and those that they cause, or that many frames."""
        if count == "all":
            self.world.deliver_all()
            return
        for _ in range(int(count)):
            self.world.deliver(self.world.network.popleft())

    def lose(self) -> None:
        """Lose every frame under way."""
        self.world.trace.append(f"lost {len(self.world.network)} frames")
        self.world.network.clear()

    def double(self) -> None:
        """Every frame under way arrives twice."""
        self.world.network.extend(list(self.world.network))

    def keep(self) -> None:
        """Take the frames under way out of the network, for `release`."""
        self.world.trace.append(f"kept {len(self.world.network)} frames")
        self.kept += self.world.network
        self.world.network.clear()

    def release(self) -> None:
        """The kept frames arrive now."""
        self.world.network.extend(self.kept)
        self.kept = []

    def tick(self, ms: str) -> None:
        self.world.tick(int(ms))

    def follower(self, what: str, argument: str = "") -> None:
        world = self.world
        if what == "down":
            world.stop_follower()
        elif what == "up":
            world.start_follower()
            world.up = True
        elif what == "power":
            world.stop_follower()
            world.follower_log.lose_power(int(argument))
        elif what == "tail":
            world.follower_log.append(b"~" * int(argument))
            world.follower_log.sync()
        elif what == "flip":
            self._flip(int(argument))
        elif what == "epoch":
            world.follower.highest_epoch = int(argument)
        else:
            raise ValueError(what)

    def _flip(self, offset: int) -> None:
        """Other bytes, with a chain that is right for them."""
        log = self.world.follower_log
        log.data[offset] ^= 255
        units, log.units = log.units, []
        for unit in units:
            crc = crc32c(bytes(log.data[unit.start : unit.end]))
            log.units.append(ChainUnit(unit.start, unit.end, unit.epoch, crc, log.value))

    def leader(self, what: str, argument: str = "") -> None:
        world = self.world
        if what == "power":
            world.leader_log.lose_power(int(argument))
            world.waiting.clear()
            world.network.clear()
            world.start_leader()
        elif what == "restart":
            world.start_leader()
        elif what == "sync-to":
            world.leader_log.synced_end = int(argument)
            world.progress()
        elif what == "rebuild":
            world.leader_log.rebuild_chain(0)
            world.network.clear()
            world.start_leader()
        elif what == "lose-all":
            world.leader_log.truncate_unchecked(0)
            # Lost bytes are not confirmed any more: recovery gives a new Replication this end.
            world.published = 0
            world.waiting.clear()
            world.start_leader()
        else:
            raise ValueError(what)

    def state(self) -> None:
        world = self.world
        leader, follower = world.leader_log, world.follower_log
        same = follower.data[: len(leader.data)] == leader.data[: len(follower.data)]
        world.trace += [
            f"leader appended={len(leader.data)} synced={leader.synced_end} confirmed={world.published} "
            f"{world.leader.phase.value}",
            f"follower appended={len(follower.data)} synced={follower.synced_end} "
            f"confirmed={follower.confirmed_end} {'same' if same else 'different'} bytes",
        ]


SCRIPTS: dict[str, type[CombinerScript] | type[MirrorScript]] = {
    "combiner": CombinerScript,
    "mirror": MirrorScript,
}
FILES = sorted(HERE.glob("*.txt"))


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_the_transcript_comes_out_as_written(path):
    script = SCRIPTS[path.stem.partition("_")[0]]()
    written = path.read_text(encoding="utf-8").splitlines()
    replayed: list[str] = []
    in_outcome = False

    for line in written:
        if line.startswith("> "):
            replayed.append(line)
            replayed += script.run(line[2:].split())
            in_outcome = True
        elif not line or line.startswith("#"):
            in_outcome = False
            replayed.append(line)
        elif not in_outcome:
            raise ValueError(f"{path.name}: neither command nor outcome: {line}")

    if REWRITE:
        path.write_text("\n".join(replayed) + "\n", encoding="utf-8")
    else:
        assert replayed == written


def test_there_are_transcripts_for_every_script():
    assert {path.stem.partition("_")[0] for path in FILES} == set(SCRIPTS)
