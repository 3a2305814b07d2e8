"""The replicas of a shard under random faults, and under all schedules of a few exchanges. See docs/reliability.md.

RAYMQ_SIMULATED_STEPS in the environment multiplies the number of runs, RAYMQ_SEARCH_DEPTH is the number of exchanges of
which all schedules are tried, and `nox -s simulate` raises both.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest

from raymq.replication.election import ElectionMachine
from tests.replication.simulate import mutants
from tests.replication.simulate.__main__ import main
from tests.replication.simulate.chaos import Chaos, run_seeds
from tests.replication.simulate.search import Bounds, search
from tests.replication.simulate.store import Broken, ReplicaStore
from tests.replication.simulate.world import World
from tests.support import tier

STEPS = 2_000
RUNS = {1: 60, 2: 140, 3: 600, 5: 220}
FACTOR = tier.share("RAYMQ_SIMULATED_STEPS", quick=0.25)
#: 23,741 states; 7 exchanges have 362,654, which take 3 GB
SEARCH_DEPTH = int(os.environ.get("RAYMQ_SEARCH_DEPTH", "5"))


@pytest.mark.parametrize("members", RUNS)
def test_nothing_confirmed_is_lost_or_changed_and_all_replicas_agree_after_healing(members: int):
    figures = run_seeds(range(round(RUNS[members] * FACTOR)), members=members, steps=STEPS)
    print(f"{members} replicas:", dict(figures))
    # A simulation in which nothing happens would find nothing.
    assert figures["elections"] > 2 * figures["runs"]
    assert figures["confirmations"] > 5 * figures["runs"]
    assert figures["acks"] > 5 * figures["runs"]
    assert figures["duplicates"] > 5 * figures["runs"]
    assert figures["refused gaps"] > figures["runs"] // 12


@pytest.mark.parametrize("members", [2, 3, 5])
def test_replaced_replicas_that_still_run_change_nothing_that_was_confirmed(members: int):
    figures = run_seeds(
        range(round(RUNS[members] // 4 * FACTOR)), members=members, steps=STEPS, replaces=True
    )
    print(f"{members} replicas:", dict(figures))
    assert figures["replaced replicas"] > figures["runs"]
    assert figures["confirmations"] > 4 * figures["runs"]


@pytest.mark.parametrize("members", [2, 3, 5])
def test_new_replicas_follow_a_log_whose_oldest_segments_are_deleted(members: int):
    figures = run_seeds(
        range(round(RUNS[members] // 4 * FACTOR)),
        members=members,
        steps=STEPS,
        replaces=True,
        deletes=True,
    )
    print(f"{members} replicas:", dict(figures))
    assert figures["deleted segments"] > figures["runs"] // 4
    assert figures["logs begun later"] > figures["runs"] // 10
    assert figures["confirmations"] > 4 * figures["runs"]


@pytest.mark.parametrize("members", [3, 5])
def test_after_failed_syncs_of_several_replicas_nothing_is_lost_and_others_copy_what_they_lack(
    members: int,
):
    figures = run_seeds(
        range(round(RUNS[members] // 2 * FACTOR)), members=members, steps=STEPS, fails_syncs=True
    )
    print(f"{members} replicas:", dict(figures))
    assert figures["failed syncs"] > 2 * figures["runs"]
    assert figures["ranges copied"] > 0
    assert figures["confirmations"] > 4 * figures["runs"]


@pytest.mark.parametrize(("replicas", "runs"), [(2, 60), (3, 120), (5, 40)])
def test_a_shard_of_one_replica_that_gets_further_ones_loses_nothing(replicas: int, runs: int):
    figures = run_seeds(
        range(round(runs * FACTOR)),
        members=1,
        steps=STEPS,
        replaces=True,
        deletes=True,
        grows=replicas,
    )
    print(f"1 replica, then {replicas}:", dict(figures))
    # The others end their growth when everything heals.
    assert figures["grown shards"] > figures["runs"] // 2
    assert figures["replaced replicas"] > figures["runs"] // 2
    assert figures["confirmations"] > 5 * figures["runs"]


@pytest.mark.parametrize(("members", "survivors", "runs"), [(3, 1, 75), (5, 2, 110)])
def test_a_shard_that_an_operator_recovers_without_a_majority_has_one_truth_again(
    members: int, survivors: int, runs: int
):
    lost, runs = 0, round(runs * max(1, FACTOR))
    for seed in range(runs):
        chaos = Chaos(seed, members=members, deletes=True)
        for action in chaos.rng.choices(chaos.actions, chaos.weights, k=STEPS // 2):
            action()
        kept = chaos.rng.sample(range(members), survivors)
        lost += chaos.world.recover_unclean(kept) > 0
        chaos.run(STEPS // 2)
    print(f"{members} replicas: {runs} recoveries, {lost} of them lost confirmed bytes")
    assert 0 < lost < runs


def test_a_run_that_fails_names_the_command_that_repeats_it(
    monkeypatch: pytest.MonkeyPatch,
):
    def fail(chaos: Chaos) -> None:
        raise Broken(f"{chaos.members} replicas, {chaos.world.elections} elections")

    monkeypatch.setattr(Chaos, "heal", fail)
    with pytest.raises(Broken) as found:
        run_seeds(range(41, 43), members=2, steps=300)
    command, _, fault = str(found.value).partition(": ")

    python, module, name, *options = command.split()
    assert (python, module, name) == ("python", "-m", main.__module__.rpartition(".")[0])
    monkeypatch.setattr("sys.argv", [name, *options])
    with pytest.raises(Broken) as repeated:
        main()
    assert str(repeated.value) == f"{command}: {fault}"


def caught_by_chaos(members: int = 3, **parts: Any) -> bool:
    for seed in range(800):
        try:
            Chaos(seed, members=members, **parts).run(STEPS)
        except Broken:
            return True
    return False


@pytest.mark.parametrize(
    ("machine", "members"),
    [
        pytest.param(machine, members, marks=tier.thorough(machine is mutants.LeadsOnUncalled))
        for machine, members in mutants.FOUND_BY_CHAOS.items()
    ],
)
def test_random_faults_find_a_machine_without_a_rule(machine: type[ElectionMachine], members: int):
    assert caught_by_chaos(members, machine=machine)


@pytest.mark.thorough
@pytest.mark.parametrize(("machine", "members"), mutants.FOUND_WHEN_REPLACED.items())
def test_replaced_replicas_find_a_machine_without_a_rule(
    machine: type[ElectionMachine], members: int
):
    assert caught_by_chaos(members, machine=machine, replaces=True)


@pytest.mark.thorough
def test_random_faults_find_a_follower_that_acknowledges_before_the_sync():
    assert caught_by_chaos(receiver=mutants.AcksBeforeTheSync)


@pytest.mark.parametrize(
    "published", [mutants.published_without_own_sync, mutants.published_before_the_epoch_record]
)
def test_random_faults_find_a_replication_that_publishes_too_much(published: Callable[..., int]):
    assert caught_by_chaos(published=published)


@pytest.mark.parametrize(("part", "mutant"), mutants.FOUND_WHEN_GROWN)
def test_a_growing_shard_finds_a_part_without_a_rule(part: str, mutant: type):
    assert caught_by_chaos(1, grows=3, **{part: mutant})


@pytest.mark.parametrize("store", mutants.STORES)
def test_random_faults_find_a_store_without_a_rule(store: type[ReplicaStore]):
    assert caught_by_chaos(store=store)


def test_an_ack_in_another_order_than_that_of_the_puts_is_an_error():
    world = World(1, random.Random(7))
    (node,) = world.nodes
    world.tick(0)
    world.tick(5_000)
    world.put(node)
    (put,) = [each for producer in world.producers for each in producer.pending]
    # As if the ack of a message at a higher offset had come before the put began.
    put.floor = len(node.log.data)
    with pytest.raises(Broken, match="was sent after the ack"):
        world.sync(node)


@pytest.mark.parametrize("machine", mutants.BOUNDS)
def test_all_schedules_find_a_machine_without_a_rule(machine: type[ElectionMachine]):
    found = search(machine, mutants.BOUNDS[machine])
    assert found.fault, f"{found.states} states to depth {found.depth}"


def test_no_schedule_of_a_few_exchanges_breaks_an_invariant():
    found = search(ElectionMachine, Bounds(depth=SEARCH_DEPTH, states=1_000_000))
    print(f"{found.states} states to depth {found.depth}")
    assert not found.fault, found.schedule
    assert found.depth == SEARCH_DEPTH
