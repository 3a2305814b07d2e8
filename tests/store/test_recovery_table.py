"""The recovery decision table answers every combination of facts exactly once, and for the right reason."""

from itertools import product
from pathlib import Path

from raymq.store.log.recovery.recovery_table import ROWS, Decision, Facts, decide

ALL = [Facts(*bits) for bits in product((False, True), repeat=6)]


def test_every_combination_is_answered_by_exactly_one_row():
    for facts in ALL:
        assert [row.name for row in ROWS if row.matches(facts)] == [decide(facts).name], facts


def test_every_row_answers_some_combination():
    assert {decide(facts).name for facts in ALL} == {row.name for row in ROWS}


def test_nothing_below_the_synced_mark_of_our_own_store_is_ever_cut():
    for facts in ALL:
        if facts.own and facts.below_synced:
            assert decide(facts).decision is Decision.CORRUPT


def test_without_a_reboot_nothing_below_the_appended_mark_is_ever_cut():
    for facts in ALL:
        if facts.own and facts.same_boot and facts.below_appended:
            assert decide(facts).decision is Decision.CORRUPT


def test_records_of_a_foreign_store_that_may_be_acknowledged_are_never_cut():
    for facts in ALL:
        if not facts.own and facts.below_appended and facts.later_valid:
            assert decide(facts).decision is Decision.CORRUPT


def test_leftover_bytes_are_never_kept_after_the_end_of_a_log():
    for facts in ALL:
        if facts.dirty:
            assert decide(facts).decision is not Decision.KEEP


def test_every_row_says_what_can_have_happened():
    assert all(len(row.cause) > 30 for row in ROWS)


def test_the_table_in_the_documentation_is_the_one_in_the_code():
    text = (Path(__file__).parents[2] / "docs" / "recovery.md").read_text()
    begin, end = (text.index(f"decision table: {name}") for name in ("begin", "end"))
    written = [line for line in text[begin:end].splitlines() if line.startswith("| ")][1:]
    words = {None: "any", True: "yes", False: "no"}
    for row, line in zip(ROWS, written, strict=True):
        expected = [row.name, *map(words.get, row.wanted), row.decision.value, row.cause]
        assert line == f"| {' | '.join(expected)} |"
