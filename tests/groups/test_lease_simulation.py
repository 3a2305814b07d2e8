"""Leases under random faults, and under all schedules of a few exchanges. See docs/reliability.md.

RAYMQ_SIMULATED_STEPS in the environment multiplies the number of runs, RAYMQ_GROUP_STATES is how many states each
search visits.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from raymq.store.groups.leases import queue_columns
from tests.groups.simulate.search import search
from tests.groups.simulate.walks import run_seeds
from tests.groups.simulate.world import Broken
from tests.groups.simulate_leases import mutants
from tests.groups.simulate_leases.schedules import SCHEDULES, heal
from tests.groups.simulate_leases.world import World
from tests.groups.simulate_leases.worlds import KINDS, LONG, SMALL, WORLDS
from tests.support import tier

#: 1.2 million steps in all
RUNS = 700
STEPS = 200
FACTOR = tier.share("RAYMQ_SIMULATED_STEPS", quick=0.05)
STATES = int(os.environ.get("RAYMQ_GROUP_STATES", "300"))
#: so many walks of each world find each mutant, some of them after seconds
MUTANT_SEEDS = 300
FOUND_LATE = ("L6 one deadline", "clocks differ by a tenth")


@pytest.mark.parametrize("name", WORLDS)
def test_each_message_is_settled_once_under_random_faults(name: str):
    first = 1_000_000 * list(WORLDS).index(name)
    seeds = range(first, first + round(RUNS * FACTOR))
    figures = run_seeds(seeds, WORLDS[name], steps=STEPS, make=World)
    print(f"{name}:", dict(figures))
    # A simulation in which nothing happens would find nothing.
    assert figures["crash"] > figures["runs"]
    assert figures["ack"] > figures["runs"]
    assert figures["nack"] + figures["reject"] + figures["release"] > figures["runs"] // 4
    assert figures["extend"] + figures["again"] > figures["runs"]


def test_columns_that_grow_and_shrink_keep_the_rules(monkeypatch):
    monkeypatch.setattr(queue_columns, "_FIRST_ROOM", 1)
    monkeypatch.setattr(queue_columns, "_SHRUNK_ROOM_MIN", 4)
    monkeypatch.setattr(queue_columns, "_SHARE_LEFT", 4)
    monkeypatch.setattr(queue_columns, "_ENTRY_OFFSETS", 2)
    for name in ("three workers, twelve messages", "in the order of keys"):
        run_seeds(range(round(RUNS * FACTOR)), WORLDS[name], steps=STEPS, make=World)


def test_a_seed_gives_the_same_run_again():
    first, second = (run_seeds([7], LONG, steps=STEPS, make=World) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("fault", KINDS)
def test_all_schedules_with_one_fault_keep_the_rules(fault: str):
    bounds = replace(SMALL, faults=((fault, 1),))
    found = search(bounds, states=STATES, make=World)
    print(fault, found)
    assert found.is_whole or found.states >= STATES


@pytest.mark.parametrize("name", SCHEDULES)
def test_rare_schedules_keep_the_rules(name: str):
    heal(SCHEDULES[name]())


def _walk(seeds: int) -> None:
    for seed in range(seeds):
        for bounds in WORLDS.values():
            run_seeds([seed], bounds, steps=STEPS, make=World)


@pytest.mark.parametrize(
    ("owner", "name", "mutant"),
    [
        pytest.param(*each, id=rule, marks=tier.thorough(rule in FOUND_LATE))
        for rule, *each in mutants.BY_WALKS
    ],
)
def test_random_walks_find_a_missing_rule(monkeypatch, owner, name, mutant):
    monkeypatch.setattr(owner, name, mutant)
    with pytest.raises(Broken):
        _walk(MUTANT_SEEDS)


@pytest.mark.parametrize(
    ("changes", "schedule"),
    [each[1:] for each in mutants.BY_SCHEDULES],
    ids=[each[0] for each in mutants.BY_SCHEDULES],
)
def test_a_rare_schedule_finds_a_missing_rule(monkeypatch, changes, schedule):
    for owner, name, mutant in changes:
        monkeypatch.setattr(owner, name, mutant)
    with pytest.raises(Broken):
        heal(SCHEDULES[schedule]())


@pytest.mark.parametrize(
    ("owner", "name", "mutant"),
    [each[1:] for each in mutants.HARMLESS],
    ids=[each[0] for each in mutants.HARMLESS],
)
def test_a_rule_that_only_saves_time_is_missed_by_no_invariant(monkeypatch, owner, name, mutant):
    monkeypatch.setattr(owner, name, mutant)
    _walk(round(20 * FACTOR))
