"""The tables of `benchmarks.compare`."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import compare
from benchmarks.rounds import Rounds

FIGURES = {
    "durable/RayMQ/one_p50_ms": 0.5,
    "durable/RayMQ/produce_msg_s": 300.0,
    "durable/RayMQ/produce_batches_msg_s": 600.0,
    "durable/Redis/one_p50_ms": 1.0,
    "durable/Redis/produce_msg_s": 100.0,
    "unsynced/Redis/produce_msg_s": 900.0,
}


@pytest.fixture
def rounds() -> Rounds:
    found = Rounds()
    for name, value in FIGURES.items():
        found.note(name, value)
    return found


@pytest.mark.parametrize(
    ("figure", "ratio"),
    [
        ("one_p50_ms", 2),
        ("produce_msg_s", 3),
        ("produce_batches_msg_s", 6),
        ("read_msg_s", None),
    ],
)
def test_more_than_one_means_that_raymq_is_faster(
    figure: str, ratio: float | None, rounds: Rounds
) -> None:
    (load,) = (load for load in compare.LOADS if load.figure == figure)
    assert compare.times_as_fast("durable", "Redis", load, rounds) == ratio


def test_the_groups_have_tables_of_their_own(rounds: Rounds, tmp_path: Path) -> None:
    compare.write_page(tmp_path / "page", rounds)
    durable, unsynced = (tmp_path / "page").read_text().split("## Not synced")
    assert "| producer | 300 | 100 |" in durable
    assert "900" not in durable
    assert "| producer | 900 |" in unsynced


def test_a_second_run_replaces_the_figures_and_keeps_the_text(
    rounds: Rounds, tmp_path: Path
) -> None:
    page = tmp_path / "page"
    page.write_text(f"before\n{compare.BEGIN}\nold\n{compare.END}\nafter\n")
    for _ in range(2):
        compare.write_page(page, rounds)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith(f"{compare.END}\nafter\n")
    assert "old" not in text
    assert text.count("| producer |") == 3
