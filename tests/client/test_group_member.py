"""What a member of a group says with its heartbeats, without I/O."""

from __future__ import annotations

import pytest

from raymq.client.consume.group_member import GroupMember
from raymq.store.groups.heartbeat import BeatAnswer, JoinRequest
from raymq.store.groups.members import MemberFacts, TopicSubscription

A, B, C = (("t", queue_id) for queue_id in range(3))


@pytest.fixture
def member() -> GroupMember:
    """A member that has applied its first assignment, of two queues."""
    member = GroupMember("0" * 32, JoinRequest(MemberFacts(TopicSubscription(("t",)))))
    answer(member, 3, {A: 4, B: 5})
    return member


def answer(member: GroupMember, version: int, assignment: dict[tuple[str, int], int]) -> None:
    member.answered(member.beat(), BeatAnswer(version, assignment, 3_000, 15_000), 0)


def test_the_first_heartbeat_says_that_a_member_has_no_queue() -> None:
    member = GroupMember("0" * 32, JoinRequest(MemberFacts(TopicSubscription(("t",)))))
    assert member.beat().owned == {}


def test_a_member_that_has_the_queues_of_its_assignment_sends_no_list_of_them(
    member: GroupMember,
) -> None:
    assert (member.beat().version, member.beat().owned) == (3, None)


def test_a_member_lists_its_queues_until_it_has_released_those_that_it_must(
    member: GroupMember,
) -> None:
    answer(member, 6, {B: 5, C: 7})
    assert member.beat().owned == {A: 4, B: 5, C: 7}
    member.released([A])
    assert (member.beat().version, member.beat().owned) == (6, None)


def test_a_member_that_lost_a_queue_lists_the_others_until_its_next_assignment(
    member: GroupMember,
) -> None:
    assert member.lost(A, 4)
    assert member.beat().owned == {B: 5}
    answer(member, 8, {B: 5, A: 9})
    assert member.beat().owned is None
