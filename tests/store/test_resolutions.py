"""Which half messages are resolved: a small table, whatever the order."""

import random

from raymq.store.services.resolutions import BLOCK, KEPT_BLOCKS, Resolution, Resolutions


def apply(table, values):
    for key, value in values.items():
        if value is None:
            table.pop(key, None)
        else:
            table[key] = value


def test_offsets_resolved_in_any_order_are_distinguished_and_the_first_open_one_is_known():
    chance, table = random.Random(1), {}
    kinds = (Resolution.COMMIT, Resolution.ROLLBACK, Resolution.DISCARD)
    want = {offset: chance.choice(kinds) for offset in range(3 * BLOCK)}
    order = list(want)
    chance.shuffle(order)
    for number, offset in enumerate(order):
        apply(table, Resolutions(table).resolve({offset: want[offset]}))
        done = order[: number + 1]
        view = Resolutions(table)
        open_ones = sorted(set(want) - set(done))
        assert view.min_open == (open_ones[0] if open_ones else len(want))
        if number % 50 == 0:
            assert list(view.open_ones(len(want))) == open_ones
    assert {offset: Resolutions(table).of(offset) for offset in want} == want


def test_what_was_resolved_long_ago_is_forgotten_but_not_that_it_was():
    table: dict = {}
    count = (KEPT_BLOCKS + 3) * BLOCK
    for offset in range(count):
        apply(table, Resolutions(table).resolve({offset: Resolution.COMMIT}))
    view = Resolutions(table)
    assert view.of(0) is None
    assert view.of(count - 1) is Resolution.COMMIT
    assert view.of(count) is Resolution.OPEN
    assert len(table) <= KEPT_BLOCKS + 2


def test_nothing_changes_before_the_values_are_stored():
    table: dict = {}
    assert Resolutions(table).resolve({0: Resolution.COMMIT}) == {
        "0": f"{1:0{BLOCK // 2}x}",
        "min": 1,
    }
    assert table == {}
    assert Resolutions(table).of(0) is Resolution.OPEN


def test_whole_blocks_are_passed_at_once():
    table: dict = {}
    count = 100 * BLOCK
    found = {offset: Resolution.COMMIT for offset in range(count) if offset not in (0, 5 * BLOCK)}
    apply(table, Resolutions(table).resolve(found))
    assert list(Resolutions(table).open_ones(count + 2)) == [0, 5 * BLOCK, count, count + 1]
    apply(table, Resolutions(table).resolve({0: Resolution.ROLLBACK}))
    assert Resolutions(table).min_open == 5 * BLOCK
    apply(table, Resolutions(table).resolve({5 * BLOCK: Resolution.ROLLBACK}))
    assert Resolutions(table).min_open == count
    assert Resolutions(table).of(count - 1) is Resolution.COMMIT
    assert Resolutions(table).of(0) is None
    assert len(table) <= KEPT_BLOCKS + 2
