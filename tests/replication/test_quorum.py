"""How many replicas must hold a record: the leader and enough followers are a majority."""

from __future__ import annotations

import math
from itertools import product

import pytest

from raymq.replication.quorum import (
    confirmed_end,
    majority,
    prompt_followers,
    published_end,
    replicated_end,
)


@pytest.mark.parametrize("members", [2, 3, 4, 5, 7])
def test_with_the_leader_the_followers_that_count_are_a_majority(members: int) -> None:
    for ends in product((0, 1, 2), repeat=members - 1):
        end = replicated_end(ends)
        assert 1 + sum(each >= end for each in ends) >= majority(members)
        # The next higher end would not be held by a majority.
        assert 1 + sum(each > end for each in ends) < majority(members)


@pytest.mark.parametrize("members", [2, 3, 5])
def test_a_leader_that_holds_more_than_its_followers_confirms_what_they_replicated(
    members: int,
) -> None:
    for ends in product((0, 1, 2), repeat=members - 1):
        held = {0: 9, **dict(enumerate(ends, start=1))}
        assert confirmed_end(members, held) == replicated_end(ends)


@pytest.mark.parametrize("members", [2, 3, 5])
def test_a_leader_publishes_nothing_that_it_has_not_itself_or_that_is_before_its_epoch(
    members: int,
) -> None:
    for own, *ends in product((0, 1, 2, 3), repeat=members):
        end = published_end(2, own, ends)
        assert end == 0 or 2 <= end <= own
        # No more than what a majority of all replicas holds, and all of it that the leader has itself.
        known = confirmed_end(members, dict(enumerate([own, *ends])))
        assert end <= known
        if min(known, own) >= 2:
            assert end == min(known, own)


def test_a_leader_alone_publishes_what_is_durable_on_its_own_disk() -> None:
    assert [published_end(2, own, []) for own in (0, 1, 2, 3)] == [0, 0, 2, 3]


@pytest.mark.parametrize(("members", "prompt"), [(2, {1}), (3, {1}), (4, {1, 2}), (5, {1, 2})])
def test_as_many_followers_are_prompt_as_are_a_majority_with_the_leader(
    members: int, prompt: set[int]
) -> None:
    ack_ms = dict.fromkeys(range(1, members), 3.0)
    assert prompt_followers(members, ack_ms, ()) == prompt


def test_the_fastest_followers_are_prompt_at_first() -> None:
    assert prompt_followers(5, {1: 9.0, 2: 4.0, 3: 8.0, 4: 1.0}, ()) == {2, 4}


def test_a_prompt_follower_stays_unless_another_one_is_more_than_twice_as_fast() -> None:
    assert prompt_followers(3, {1: 8.0, 2: 4.0}, {1}) == {1}
    assert prompt_followers(3, {1: 12.0, 2: 4.0}, {1}) == {2}
    assert prompt_followers(5, {1: 30.0, 2: 4.0, 3: 5.0, 4: 6.0}, {1, 2}) == {2, 3}


def test_a_follower_whose_time_is_not_known_displaces_none_and_is_taken_if_it_is_needed() -> None:
    assert prompt_followers(3, {1: 50.0, 2: math.inf}, {1}) == {1}
    assert prompt_followers(3, {1: math.inf, 2: 50.0}, {1}) == {2}
    assert prompt_followers(3, {1: math.inf, 2: math.inf}, ()) == {1}


def test_a_follower_that_is_not_reached_is_not_prompt() -> None:
    assert prompt_followers(3, {2: 400.0}, {1}) == {2}
    assert prompt_followers(5, {2: 400.0}, {1, 2}) == {2}
    assert prompt_followers(3, {}, {1}) == frozenset()
