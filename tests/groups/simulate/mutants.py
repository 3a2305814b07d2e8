"""The machines of groups with one rule removed, for each rule: (rule, owner, name, what takes its place)."""

from __future__ import annotations

from typing import Any

from raymq.client.consume import group_member
from raymq.client.consume.group_member import GroupMember
from raymq.store.groups import coordinator
from raymq.store.groups.claims import ClaimTable
from raymq.store.groups.coordinator import Coordinator, LiveGroup, Session
from raymq.store.groups.group_table import GroupTable

from . import world
from .world import World

fold_groups, plan_commit, answer = world.fold_groups, ClaimTable.plan_commit, World.answer


def any_report_releases(beat, version):
    return True


def answer_at_once(self: World, log, message):
    """Of the coordinator."""
    if log is self.log:
        self.send(message)
    else:
        answer(self, log, message)


def answer_claims_at_once(self: World, log, message):
    if message.kind == "claimed":
        self.send(message)
    else:
        answer(self, log, message)


def answer_commits_at_once(self: World, log, message):
    if message.kind == "committed":
        self.send(message)
    else:
        answer(self, log, message)


def unchecked():
    return False


def sessions_are_over(new: Coordinator, old: Coordinator) -> None:
    new._live = {
        name: LiveGroup({member_id: Session(0, 0) for member_id in group.members})
        for name, group in new._table.groups.items()
    }


def grant_at_once(key, granted):
    return True


def commit_without_a_claim(self, group, topic, wanted, committed):
    new = {
        queue_id: each.offset
        for queue_id, each in wanted.items()
        if each.offset > committed.get(queue_id, -1)
    }
    return new, {}


def commit_any_offset(self, group, topic, wanted, committed):
    return plan_commit(self, group, topic, wanted, {})


def count_from_the_answer(sent_ms, now_ms):
    return now_ms


def numbers_of_those_left(records, *, with_snapshot) -> GroupTable:
    table = fold_groups(records, with_snapshot=with_snapshot)
    members = [each for group in table.groups.values() for each in group.members.values()]
    numbers = [number for each in members for number in (each.version, *each.grants.values())]
    table.number = max(numbers, default=0)
    return table


def drop_after_leaving(self: World, name: str) -> None:
    self.left["leave"] -= 1
    member = self.processes[name].member
    beat = world.Beat(member.member_id, is_leaving=True)
    self.send(world.Message("beat", name, member.member_id, beat=beat))


def take_any_claim_in_time(self: GroupMember, key, number, version, now_ms):
    return version == self.version and key not in self.claimed and self.assigned.get(key) == number


def take_claims_of_old_versions(self: GroupMember, key, number, version, now_ms):
    return self.believes(now_ms) and key not in self.claimed and self.assigned.get(key) == number


def count_versions(draft, before):
    draft.next_number()
    return before + 1


def take_old_answers(self: GroupMember, version):
    return version != self.version


def say_nothing_of_its_queues(self: GroupMember) -> None:
    return None


def begin_where_it_looked_before(message, committed):
    return message.offset


def one_id(name, joined):
    return f"{name}1"


def replace_at_once(draft: Any, member_id: str) -> None:
    draft.remove(member_id)


def forget_the_heir(draft: Any, member_id: str) -> None:
    draft.remove(member_id)


#: found by random walks
BY_WALKS = [
    (coordinator, "_has_applied", any_report_releases),
    (World, "answer", answer_at_once),
    (world, "deposed_is_checked", unchecked),
    (world, "activate", sessions_are_over),
    (coordinator, "_may_grant", grant_at_once),
    (ClaimTable, "plan_commit", commit_without_a_claim),
    (world, "counted_from", count_from_the_answer),
    (world, "fold_groups", numbers_of_those_left),
    (ClaimTable, "plan_commit", commit_any_offset),
    (World, "leave", drop_after_leaving),
    (World, "answer", answer_commits_at_once),
    (World, "answer", answer_claims_at_once),
    (GroupMember, "takes_claim", take_any_claim_in_time),
    (coordinator, "_next_version", count_versions),
    (GroupMember, "_is_newer", take_old_answers),
    (GroupMember, "_owned", say_nothing_of_its_queues),
    (world, "member_id", one_id),
    (coordinator, "_replace", replace_at_once),
    (group_member, "BELIEF_PERCENT", 100),
]

#: found by the second model of the rules, since no invariant says which queues a member gets
BY_REFERENCE = [(coordinator, "_remove", forget_the_heir)]

#: what decides on the records and answers of groups
DECIDING = (coordinator, ClaimTable)

#: found by a schedule that random walks seldom meet: with the name of that schedule
BY_SCHEDULES = [
    (world, "claimed_offset", begin_where_it_looked_before, "offset_read_before_the_claim"),
    (GroupMember, "takes_claim", take_claims_of_old_versions, "claim_after_a_cancelled_revocation"),
    (coordinator, "FORMER_MAX", -1000, "join_that_comes_again_after_its_member_was_removed"),
    (coordinator, "_next_version", count_versions, "member_that_comes_into_being_again"),
]
