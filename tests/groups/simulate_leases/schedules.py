"""Schedules that random walks seldom meet. Each line is the beginning of an event's name."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from . import world
from .world import FAULTS, Bounds, World

#: every kind of fault, a few times
FEW_FAULTS = Bounds(
    messages=1,
    batch=1,
    held=1,
    ticks=12,
    max_attempts=None,
    network=20,
    faults=tuple((kind, 4) for kind, _ in FAULTS),
)


def run(lines: str, bounds: Bounds) -> World:
    """Run a schedule. Raises: Broken; LookupError for an event that cannot happen."""
    made = World(bounds)
    for line in lines.strip().splitlines():
        begin = line.split("#")[0].strip()
        found = [each for each in made.events() if str(each).startswith(begin)]
        if not found:
            raise LookupError(begin, [*map(str, made.events())])
        min(found, key=str).run(made)
        made.check()
    return made


def heal(made: World) -> None:
    """End the faults. Raises: Broken."""
    made.heal(random.Random(0).choice)


def leased(name: str) -> str:
    return f"""
        lease {name}
        deliver lease {name}1
        confirm
        deliver leased {name}1
    """.strip()


def request_for_a_lease_that_comes_again_late() -> World:
    return run(
        f"""
        lease a
        deliver lease a1
        confirm
        lose leased a1
        tick
        again a
        deliver lease a1
        confirm
        deliver leased a1
        tick                   # the first deadline, which a new request has moved
        {leased("b")}
        """,
        FEW_FAULTS,
    )


def extension_by_a_deposed_leader() -> World:
    return run(
        f"""
        {leased("a")}
        crash 2
        tick
        extend a
        {ask_deposed_or_lose("extend a1")}
        tick
        {leased("b")}
        """,
        FEW_FAULTS,
    )


def ask_deposed_or_lose(begin: str) -> str:
    """Only a leader whose checks are off answers."""
    if world.deposed_is_checked():
        return f"lose {begin}"
    return f"ask_deposed {begin}\n deliver extended"


def settlement_of_an_old_lease_while_a_new_one_is_held() -> World:
    return run(
        f"""
        {leased("a")}
        nack a
        double settle a1
        confirm
        deliver settled a1
        tick
        {leased("a")}
        deliver settle a1      # the copy: its lease is over
        confirm
        tick
        {leased("b")}
        """,
        FEW_FAULTS,
    )


def settlement_that_comes_late_and_again_after_a_crash() -> World:
    """Its lease has no time left, but no other lease: a refusal would become untrue with a new leader."""
    return run(
        """
        lease a
        deliver lease a1
        confirm
        deliver leased a1
        ack a all
        tick
        tick
        double settle a1
        confirm
        deliver settled a1
        crash
        deliver settle a1
        confirm
        """,
        FEW_FAULTS,
    )


def refusal_by_an_order_that_changes() -> World:
    return run(
        """
        lease a
        deliver lease a1
        confirm
        deliver leased a1
        ack a last
        double settle a1       # refused: an earlier one of its key is not settled
        confirm
        deliver settled a1
        trim 0                 # the earlier one is settled
        deliver settle a1      # the copy
        confirm
        """,
        replace(FEW_FAULTS, messages=2, batch=2, order="queue"),
    )


def longer_time_of_one_message_and_a_new_leader() -> World:
    return run(
        f"""
        {leased("a")}
        own_longer a
        deliver own a1
        confirm
        deliver extended a1
        crash                  # with the record of the longer time
        tick
        tick
        tick
        {leased("b")}
        """,
        FEW_FAULTS,
    )


def lease_that_a_crash_takes_back() -> World:
    return run(
        """
        lease a
        deliver lease a1
        crash 1
        lease b
        deliver lease b1
        confirm
        deliver leased b1
        """,
        FEW_FAULTS,
    )


def reject_and_crash_between() -> World:
    return run(
        f"""
        {leased("a")}
        reject a
        deliver settle a1
        crash 2                # without the settlement, and without the copy
        """,
        FEW_FAULTS,
    )


SCHEDULES: dict[str, Callable[[], World]] = {
    each.__name__: each
    for each in (
        request_for_a_lease_that_comes_again_late,
        extension_by_a_deposed_leader,
        settlement_of_an_old_lease_while_a_new_one_is_held,
        settlement_that_comes_late_and_again_after_a_crash,
        refusal_by_an_order_that_changes,
        longer_time_of_one_message_and_a_new_leader,
        lease_that_a_crash_takes_back,
        reject_and_crash_between,
    )
}
