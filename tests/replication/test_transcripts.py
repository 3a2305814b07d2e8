"""Runs the transcripts beside this file: command, line, exact outcome.

A block is `> command arguments`, then what it prints, then an empty line; `#` begins a comment.
With RAYMQ_REWRITE_TRANSCRIPTS=1 in the environment the outcomes are written instead of compared:
read the difference before you keep it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from raymq.replication.combiner import PutCombiner
from raymq.store.checksum import crc32c
from raymq.store.log.chain import ChainUnit
from tests.support.mirror_world import Packet, World

HERE = Path(__file__).parent
REWRITE = os.environ.get("RAYMQ_REWRITE_TRANSCRIPTS") == "1"


class CombinerScript:
    """add SEQUENCE END flush+replica|flush|replica, flushed END, replicated END, tick NOW_MS"""

    def __init__(self) -> None:
        self.combiner = PutCombiner()

    def run(self, words: list[str]) -> list[str]:
        name, arguments = words[0], words[1:]
        combiner = self.combiner
        if name == "add":
            wants = arguments[2].split("+")
            answers = combiner.add(
                int(arguments[0]),
                int(arguments[1]),
                wants_flush="flush" in wants,
                wants_replica="replica" in wants,
                deadline_flush_ms=5000,
                deadline_replica_ms=3000,
            )
        else:
            act: dict[str, Callable] = {
                "flushed": combiner.on_flushed,
                "replicated": combiner.on_replicated,
                "tick": combiner.on_tick,
            }
            answers = act[name](int(arguments[0]))
        lines = [f"put {answer.sequence}: {answer.status.value}" for answer in answers]
        return [*lines, f"waiting: {len(combiner)}"]


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
        """Deliver all there is and causes, or that many frames."""
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
        elif what == "promise":
            world.follower.promised = int(argument)
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
            world.start_leader()
        else:
            raise ValueError(what)

    def state(self) -> None:
        world = self.world
        leader, follower = world.leader_log, world.follower_log
        same = follower.data[: len(leader.data)] == leader.data[: len(follower.data)]
        world.trace += [
            f"leader appended={len(leader.data)} synced={leader.synced_end} C={world.published} "
            f"{world.leader.phase.value}",
            f"follower appended={len(follower.data)} synced={follower.synced_end} "
            f"C={follower.confirmed_end} {'same' if same else 'different'} bytes",
        ]


SCRIPTS = {"combiner": CombinerScript, "mirror": MirrorScript}
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
