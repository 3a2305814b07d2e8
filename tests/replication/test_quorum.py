"""How many replicas must hold a record: the leader and enough followers are a majority."""

from __future__ import annotations

from itertools import product

import pytest

from raymq.replication.quorum import confirmed_end, majority, replicated_end


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
