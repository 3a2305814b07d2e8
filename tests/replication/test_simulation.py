"""The replicas of a shard under random faults, and under all schedules of a few exchanges. See docs/reliability.md.

RAYMQ_SIMULATED_STEPS in the environment multiplies the number of runs, and `nox -s simulate` does that.
"""

from __future__ import annotations

import os

import pytest

from raymq.replication.election import ElectionMachine
from raymq.replication.log_receiver import LogReceiver
from tests.replication.simulate import mutants
from tests.replication.simulate.chaos import Chaos
from tests.replication.simulate.search import Bounds, search
from tests.replication.simulate.world import Broken

STEPS = 2_000
RUNS = {1: 60, 2: 140, 3: 600, 5: 220}
FACTOR = int(os.environ.get("RAYMQ_SIMULATED_STEPS", "1"))


@pytest.mark.parametrize("members", RUNS)
def test_nothing_confirmed_is_lost_or_changed_and_all_replicas_agree_after_healing(members: int):
    elections = confirmations = 0
    for seed in range(RUNS[members] * FACTOR):
        chaos = Chaos(seed, members=members)
        try:
            chaos.run(STEPS)
        except Exception as error:
            command = f"--seed {seed} --steps {STEPS} --members {members}"
            raise AssertionError(f"python -m tests.replication.simulate {command}") from error
        elections += chaos.world.elections
        confirmations += chaos.world.confirmations
    # A simulation in which nothing happens would find nothing.
    assert elections > RUNS[members] * FACTOR
    assert confirmations > RUNS[members] * FACTOR


def caught_by_chaos(machine: type[ElectionMachine], receiver: type[LogReceiver], runs: int) -> bool:
    for seed in range(runs):
        try:
            Chaos(seed, machine=machine, receiver=receiver).run(STEPS)
        except Broken:
            return True
    return False


@pytest.mark.parametrize("machine", mutants.FOUND_BY_CHAOS)
def test_random_faults_find_a_machine_without_a_rule(machine: type[ElectionMachine]):
    assert caught_by_chaos(machine, LogReceiver, 800)


def test_random_faults_find_a_follower_that_acknowledges_before_the_sync():
    assert caught_by_chaos(ElectionMachine, mutants.AcksBeforeTheSync, 800)


@pytest.mark.parametrize("machine", mutants.BOUNDS)
def test_all_schedules_find_a_machine_without_a_rule(machine: type[ElectionMachine]):
    found = search(machine, mutants.BOUNDS[machine])
    assert found.fault, f"{found.states} states to depth {found.depth}"


def test_no_schedule_of_a_few_exchanges_breaks_an_invariant():
    found = search(ElectionMachine, Bounds(depth=5, states=60_000))
    assert not found.fault, found.schedule
