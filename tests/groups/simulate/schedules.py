"""Schedules that random walks seldom meet. Each line is the beginning of an event's name."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from .world import Bounds, World, need

#: no fault but doubled messages, and members that leave or die
FEW_FAULTS = Bounds(ticks=8, network=20, faults=(("double", 6), ("leave", 1), ("die", 1)))


def run(lines: str, bounds: Bounds) -> World:
    """Run a schedule. Raises: Broken; LookupError for an event that cannot happen."""
    world = World(bounds)
    for line in lines.strip().splitlines():
        begin = line.split("#")[0].strip()
        found = [each for each in world.events() if str(each).startswith(begin)]
        if not found:
            raise LookupError(begin, [*map(str, world.events())])
        min(found, key=str).run(world)
        world.check()
    return world


def heal(world: World) -> None:
    """End the faults. Raises: Broken."""
    world.heal(random.Random(0).choice)


def answered_beat(name: str) -> str:
    return f"""
        beat {name}
        deliver beat {name}1
        confirm
        deliver answer {name}1
    """.strip()


def read_queue_1(name: str) -> str:
    return f"""
        claim {name} ('t', 1)
        deliver claim {name}1
        confirm_shard
        double claimed {name}1
        work {name} ('t', 1)
        work {name} ('t', 1)
        commit {name} ('t', 1)
    """.strip()


def claim_after_a_cancelled_revocation() -> World:
    return run(
        f"""
        {answered_beat("a")}
        {read_queue_1("a")}
        deliver commit a1
        confirm_shard
        deliver committed a1
        {answered_beat("b")}
        tick
        {answered_beat("a")}
        release a ('t', 1)
        leave b
        deliver beat b1        # the revocation is cancelled before a has said that it released the queue
        confirm
        tick
        {answered_beat("a")}
        deliver claimed a1     # the old answer to the old claim, under the same number
        """,
        FEW_FAULTS,
    )


def commit_that_comes_after_its_queue_was_given_up() -> World:
    return run(
        f"""
        {answered_beat("a")}
        {read_queue_1("a")}    # its commit has no answer yet
        {answered_beat("b")}
        tick
        {answered_beat("a")}
        release a ('t', 1)
        leave b
        deliver beat b1        # the revocation is cancelled
        confirm
        tick
        {answered_beat("a")}
        claim a ('t', 1)       # under the same number
        deliver claim a1
        deliver commit a1
        confirm_shard
        deliver committed a1
        deliver claimed a1 1:4 v7
        """,
        FEW_FAULTS,
    )


def offset_read_before_the_claim() -> World:
    return run(
        f"""
        {answered_beat("a")}
        {read_queue_1("a")}    # then it falls silent
        {answered_beat("b")}
        tick
        {answered_beat("b")}
        tick
        {answered_beat("b")}
        tick
        {answered_beat("b")}
        claim b ('t', 1)
        deliver commit a1
        confirm_shard
        deliver committed a1
        deliver claim b1
        confirm_shard
        deliver claimed b1
        """,
        FEW_FAULTS,
    )


def join_that_comes_again_after_its_member_was_removed() -> World:
    world = run(
        f"""
        beat a
        double beat a1
        confirm
        deliver answer a1
        die a
        tick
        {answered_beat("b")}
        tick
        tick
        expire
        confirm
        {answered_beat("b")}
        deliver beat a1 0:0 v0
        confirm
        {answered_beat("b")}
        """,
        replace(FEW_FAULTS, static=True),
    )
    need(
        not world.processes["b"].member.is_replaced, "the newest process of an instance is replaced"
    )
    return world


def member_that_comes_into_being_again() -> World:
    return run(
        f"""
        beat a
        double beat a1
        confirm
        deliver answer a1
        tick
        tick
        tick
        {answered_beat("b")}   # a has hung for a session, and is removed
        deliver beat a1 0:0 v0
        confirm
        deliver answer a1 0:0 v0 at 0
        beat a
        deliver beat a1
        confirm
        deliver answer a1
        """,
        replace(FEW_FAULTS, queues=1),
    )


SCHEDULES: dict[str, Callable[[], World]] = {
    each.__name__: each
    for each in (
        claim_after_a_cancelled_revocation,
        commit_that_comes_after_its_queue_was_given_up,
        offset_read_before_the_claim,
        join_that_comes_again_after_its_member_was_removed,
        member_that_comes_into_being_again,
    )
}
