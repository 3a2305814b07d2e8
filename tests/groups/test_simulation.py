"""Consumer groups under random faults, and under all schedules of a few exchanges. See docs/reliability.md.

RAYMQ_SIMULATED_STEPS in the environment multiplies the number of runs, RAYMQ_GROUP_STATES is how many states each
search visits. Longer runs: `nox -s simulate_groups`.
"""

from __future__ import annotations

import itertools
import os

import pytest

from raymq.store.groups import members
from tests.groups.simulate import mutants, world
from tests.groups.simulate.compared import ComparedWorld
from tests.groups.simulate.reference import Differs
from tests.groups.simulate.schedules import SCHEDULES, heal
from tests.groups.simulate.search import search
from tests.groups.simulate.walks import run_seeds
from tests.groups.simulate.world import Bounds, Broken, World
from tests.groups.simulate.worlds import KINDS, LONG, SMALL, WORLDS
from tests.support import tier

#: 1.1 million steps in all
RUNS = 600
STEPS = 400
FACTOR = tier.share("RAYMQ_SIMULATED_STEPS", quick=0.05)
STATES = int(os.environ.get("RAYMQ_GROUP_STATES", "400"))

#: of the runs, so many have a second model that decides as well
COMPARED = 0.1
#: so many walks find each mutant: the hardest needs 220 (26 in the docs are longer ones)
MUTANT_SEEDS = 400
FOUND_LATE = ("take_any_claim_in_time", "answer_claims_at_once")


def test_a_crash_between_the_records_of_a_step_keeps_the_rules(monkeypatch):
    monkeypatch.setattr(members, "RECORD_BYTES_MAX", 1)
    figures = run_seeds(
        range(round(RUNS * FACTOR)), WORLDS["three members, four queues"], steps=150
    )
    assert figures["crash"] > figures["runs"]


@pytest.mark.parametrize("name", WORLDS)
def test_no_queue_has_two_owners_and_no_commit_is_lost_under_random_faults(name: str):
    first = 1_000_000 * list(WORLDS).index(name)
    figures = run_seeds(range(first, first + round(RUNS * FACTOR)), WORLDS[name], steps=STEPS)
    print(f"{name}:", dict(figures))
    # A simulation in which nothing happens would find nothing.
    assert figures["crash"] > figures["runs"]
    assert figures["crash_shard"] > figures["runs"]
    assert figures["commit"] > figures["runs"]
    assert figures["expire"] > figures["runs"] // 2
    assert figures["release"] > figures["runs"] // 4


def compare(seeds: int, *worlds: Bounds) -> None:
    for bounds in worlds:
        run_seeds(range(seeds), bounds, steps=STEPS, make=ComparedWorld)


@pytest.mark.parametrize("name", WORLDS)
def test_each_record_and_answer_is_the_one_of_the_reference(name: str):
    first = 1_000_000 * list(WORLDS).index(name) + 500_000
    runs = max(10, round(RUNS * FACTOR * COMPARED))
    figures = run_seeds(range(first, first + runs), WORLDS[name], steps=STEPS, make=ComparedWorld)
    print(f"{name}, compared:", dict(figures))
    assert figures["deliver"] > figures["runs"]


@pytest.mark.parametrize(
    ("owner", "name", "mutant"),
    [
        *(each for each in mutants.BY_WALKS if each[0] in mutants.DECIDING),
        *mutants.BY_REFERENCE,
    ],
    ids=lambda each: _label(each),
)
def test_the_reference_finds_a_machine_that_decides_otherwise(monkeypatch, owner, name, mutant):
    monkeypatch.setattr(owner, name, mutant)
    # Without the invariants: the reference finds it alone.
    monkeypatch.setattr(world, "need", lambda *what: None)
    with pytest.raises(Broken) as raised:
        compare(MUTANT_SEEDS // 2, WORLDS["places that are kept"], LONG)
    assert isinstance(raised.value.__cause__, Differs)


def test_a_seed_gives_the_same_run_again():
    first, second = (run_seeds([7], LONG, steps=200) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("fault", KINDS)
def test_all_schedules_with_one_fault_keep_the_rules(fault: str):
    faults = ((fault, 1), ("rejoin", 1))
    found = search(Bounds(**{**vars(SMALL), "faults": faults}), states=STATES)
    print(fault, found)
    assert found.is_whole or found.states >= STATES


def test_all_schedules_with_two_faults_keep_the_rules():
    for one, other in itertools.combinations(KINDS, 2):
        bounds = Bounds(**{**vars(SMALL), "faults": ((one, 1), (other, 1))})
        search(bounds, states=STATES // 8)


def test_all_schedules_of_two_processes_of_an_instance_keep_the_rules():
    bounds = Bounds(**{**vars(SMALL), "static": True, "faults": (("double", 1), ("crash", 1))})
    found = search(bounds, states=STATES)
    assert found.is_whole or found.states >= STATES


@pytest.mark.parametrize("name", SCHEDULES)
def test_rare_schedules_keep_the_rules(name: str):
    heal(SCHEDULES[name]())


def _walk(seeds: int) -> None:
    worlds = (Bounds(), Bounds(static=True), Bounds(queues=1), Bounds(rates=(0.95, 1.05)))
    for seed in range(seeds):
        for bounds in worlds:
            run_seeds([seed], bounds, steps=150)


def _label(mutant: object) -> str:
    return getattr(mutant, "__name__", str(mutant))


@pytest.mark.parametrize(
    ("owner", "name", "mutant"),
    [
        pytest.param(
            *(owner, name, mutant),
            id=f"{name}-{_label(mutant)}",
            marks=tier.thorough(_label(mutant) in FOUND_LATE),
        )
        for owner, name, mutant in mutants.BY_WALKS
    ],
)
def test_random_walks_find_a_missing_rule(monkeypatch, owner, name, mutant):
    monkeypatch.setattr(owner, name, mutant)
    with pytest.raises(Broken):
        _walk(MUTANT_SEEDS)


@pytest.mark.parametrize(
    ("owner", "name", "mutant", "schedule"),
    mutants.BY_SCHEDULES,
    ids=[each[3] for each in mutants.BY_SCHEDULES],
)
def test_a_rare_schedule_finds_a_missing_rule(monkeypatch, owner, name, mutant, schedule):
    monkeypatch.setattr(owner, name, mutant)
    with pytest.raises(Broken):
        heal(SCHEDULES[schedule]())


def test_a_coordinator_that_leads_no_more_answers_nothing():
    made = World(Bounds(faults=(("crash", 1),)))
    made.beat("a")
    made.deliver(made.net[0])
    made.confirm()
    made.crash(len(made.log.records))
    (answer,) = made.net
    made.deliver(answer)
    made.beat("a")
    made.ask_deposed(made.net[0])
    assert made.net == []
