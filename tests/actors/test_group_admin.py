"""Administration of consumer groups over a real store: resets, pauses, deletion, and what time ends."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from raymq.actors.leader import group_records, group_service
from raymq.store.base.errors import OffsetOutOfRange, Rejected
from raymq.store.groups.claims import ENDED_MAX, Claim, ClaimTable, claim_value, ended_value
from raymq.store.groups.members import CLAIM
from raymq.store.state.shard_state import ShardState, no_offsets_body, offsets_body
from tests.actors.test_commit_log_host import Shard
from tests.actors.test_group_service import (
    GROUP,
    QUEUES,
    TOPIC,
    committed,
    member_of,
    put_messages,
    reopen,
)
from tests.support.group_members import RawMember, as_json
from tests.support.roles import leader_of
from tests.support.waiting import until

DAY_MS = 24 * 3_600_000


@pytest.fixture
def shard(tmp_path) -> Iterator[Shard]:
    made = Shard(tmp_path / "store")
    made.open()
    made.start_flusher()
    made.host.call("create_topic", {"name": TOPIC, "queues": QUEUES, "shards": [0]})
    put_messages(made.host, 5)
    yield made
    made.close()
    for flusher in made.flushers:
        flusher.kill()
        flusher.wait()


def take_number(shard: Shard, *, force: bool = False) -> int:
    asked = {"group": GROUP, "queues": {TOPIC: [0, 1]}, "force": force}
    return int(shard.host.call("take_group_number", asked)["number"])


def reset(shard: Shard, number: int, offset: int) -> dict[str, Any]:
    """Set the offsets of queues 0 and 1."""
    offsets = {"0": offset, "1": offset}
    asked = {"group": GROUP, "topic": TOPIC, "offsets": offsets, "number": number}
    return shard.host.call("reset_offsets", asked)["fenced"]


def claims_of(shard: Shard) -> dict[tuple[str, int], Claim]:
    return leader_of(shard.host).store.claims.of_group(GROUP)


def ready_member(shard: Shard, **facts: Any) -> RawMember:
    member = member_of(shard, **facts)
    member.beat()
    member.claim()
    return member


def release(shard: Shard, member: RawMember) -> None:
    """Give the claims back."""
    asked = {"group": GROUP, "topic": TOPIC, "member": member.id}
    shard.host.call("release_claims", {**asked, "numbers": as_json(member.numbers)})


def leave(member: RawMember) -> None:
    """Leave the group. The numbers that the member had stay known, as those of a process that hangs."""
    numbers = dict(member.numbers)
    member.beat(is_leaving=True)
    member.numbers = numbers


# --- resets ---------------------------------------------------------------------------------------


def test_a_reset_is_refused_while_members_have_the_queues(shard: Shard):
    member = ready_member(shard)
    with pytest.raises(Rejected, match=f"{member.id}.*--force") as refused:
        take_number(shard)
    assert (refused.value.field, refused.value.fields["found"]) == ("force", [member.id])
    member.beat(is_leaving=True)
    assert reset(shard, take_number(shard), 2) == {}
    assert committed(shard.host) == {"0": 2, "1": 2}


def test_a_forced_reset_refuses_commits_and_lets_the_member_claim_again(shard: Shard):
    member = ready_member(shard)
    member.commit({0: 4, 1: 4, 2: 4})
    before = dict(member.numbers)
    number = take_number(shard, force=True)
    assert number > max(before.values())
    assert reset(shard, number, 1) == {}
    assert member.commit({0: 5, 2: 5})["fenced"] == {"0": [number, ""]}
    assert committed(shard.host) == {"0": 1, "1": 1, "2": 5}

    asked = {"group": GROUP, "queues": {TOPIC: [0, 1]}, "number": number}
    shard.host.call("withdraw_queues", asked)
    member.beat()
    assert member.numbers.keys() == {2, 3}
    # Another step does not give the queues back before they are released.
    other = member_of(shard)
    other.beat()
    assert other.numbers == {}
    other.beat(is_leaving=True)
    until(lambda: len(member.numbers) == QUEUES, member.beat)
    assert min(member.numbers[0], member.numbers[1]) > number
    assert {each: member.numbers[each] for each in (2, 3)} == {
        each: before[each] for each in (2, 3)
    }
    assert member.claim() == {"offsets": {"0": 1, "1": 1, "2": 5}, "fenced": {}}
    assert member.commit({0: 3}) == {"fenced": {}}


def test_a_repeated_reset_does_the_same_and_one_that_is_late_does_nothing(shard: Shard):
    number = take_number(shard)
    assert reset(shard, number, 2) == {}
    assert reset(shard, number, 2) == {}
    member = ready_member(shard)
    assert reset(shard, number, 0) == {
        str(each): [member.numbers[each], member.id] for each in (0, 1)
    }
    assert committed(shard.host) == {"0": 2, "1": 2}


def test_a_reset_beyond_the_end_is_refused(shard: Shard):
    with pytest.raises(OffsetOutOfRange):
        reset(shard, take_number(shard), 6)


@pytest.mark.parametrize(
    "queues", [{}, [], {TOPIC: 0}, {TOPIC: [-1]}, {TOPIC: ["0"]}, {TOPIC: [70_000]}]
)
def test_malformed_queues_are_refused_by_name(shard: Shard, queues):
    with pytest.raises(Rejected) as refused:
        shard.host.call("take_group_number", {"group": GROUP, "queues": queues, "force": False})
    assert refused.value.field == "queues"


# --- pauses ---------------------------------------------------------------------------------------


def test_members_of_a_paused_group_keep_their_queues_and_their_belief_is_not_renewed(shard: Shard):
    member = ready_member(shard)
    kept = dict(member.numbers)
    shard.host.call("pause_group", {"group": GROUP, "paused": True})
    answer = member.beat()
    assert (answer["session_ms"], answer["paused"]) == (0, True)
    assert member.commit({0: 3}) == {"fenced": {}}

    other = member_of(shard)
    assert other.beat()["paused"] is True
    assert other.numbers == {}
    member.beat()
    assert member.numbers == kept
    assert shard.host.call("describe_group", {"group": GROUP})["paused"] is True
    assert shard.host.call("groups", {})["paused"] == [GROUP]

    reopen(shard)
    assert member.beat()["session_ms"] == 0
    shard.host.call("pause_group", {"group": GROUP, "paused": False})
    assert member.beat()["session_ms"] == 15_000
    until(lambda: len(other.numbers) == 2, lambda: [each.beat() for each in (member, other)])


def test_a_group_without_a_member_ever_cannot_be_paused(shard: Shard):
    with pytest.raises(Rejected, match="has had no member"):
        shard.host.call("pause_group", {"group": GROUP, "paused": True})


def test_a_reset_of_a_paused_group_moves_its_members(shard: Shard):
    member = ready_member(shard)
    shard.host.call("pause_group", {"group": GROUP, "paused": True})
    number = take_number(shard, force=True)
    reset(shard, number, 1)
    asked = {"group": GROUP, "queues": {TOPIC: [0, 1]}, "number": number}
    shard.host.call("withdraw_queues", asked)
    for _ in range(3):
        member.beat()
    assert member.numbers.keys() == {2, 3}
    shard.host.call("pause_group", {"group": GROUP, "paused": False})
    member.beat()
    assert len(member.numbers) == QUEUES


# --- the end of a group ---------------------------------------------------------------------------


def end_group(shard: Shard) -> dict[str, Any]:
    ended = shard.host.call("end_group", {"group": GROUP})
    asked = {"group": GROUP, "number": ended["number"]}
    return {**ended, **shard.host.call("forget_offsets", asked)}


def test_a_group_with_members_is_not_deleted(shard: Shard):
    ready_member(shard)
    with pytest.raises(Rejected, match="has 1 member"):
        end_group(shard)


def test_a_deleted_group_begins_anew_and_refuses_its_former_members(shard: Shard):
    zombie, member = ready_member(shard), member_of(shard)
    zombie.commit({0: 4})
    leave(zombie)
    ended = end_group(shard)
    assert (ended["existed"], ended["topics"]) == (True, [TOPIC])
    assert committed(shard.host) == {}
    nothing = {"coordinated": {}, "clients": {}, "paused": [], "with_offsets": [], "workers": []}
    nothing["paused_workers"] = {}
    assert shard.host.call("groups", {}) == nothing

    for opened in range(2):
        assert zombie.claim()["fenced"]["0"] == [ended["number"], ""], opened
        assert zombie.commit({0: 5})["fenced"].keys() == {"0"}
        leader_of(shard.host).store.begin_next_file()
        reopen(shard)
    assert committed(shard.host) == {}
    member.beat()
    assert min(member.numbers.values()) > ended["number"]
    assert member.claim() == {"offsets": {}, "fenced": {}}
    assert end_group_is_refused_by_claims(shard, ended["number"])


def end_group_is_refused_by_claims(shard: Shard, number: int) -> bool:
    """Whether an end that comes late leaves the new group alone."""
    with pytest.raises(Rejected, match="has got a member again"):
        shard.host.call("forget_offsets", {"group": GROUP, "number": number})
    return len(claims_of(shard)) == QUEUES


def test_an_end_that_comes_late_spares_the_offsets_of_a_new_group_that_has_left(shard: Shard):
    ended = end_group(shard)
    member = ready_member(shard)
    member.commit({0: 4})
    release(shard, member)
    leave(member)
    assert end_group_is_refused_by_claims(shard, ended["number"])
    assert committed(shard.host) == {"0": 4}


def test_an_end_does_not_make_a_deleted_claim_valid_again():
    table = ClaimTable()
    for topic, number in (("t", 9), ("u", 7)):
        table.apply(CLAIM, claim_value("g", topic, {0: Claim(number, "a")}))
    table.apply(CLAIM, {"group": "g", "topic": "v", "claims": {}})
    table.apply(CLAIM, ended_value("g", 5))
    assert table.claim_of("g", "u", 0) == (9, "")
    assert table.plan("g", "t", "a", {0: 9}) == ({}, {0: (9, "")})


def test_a_group_that_only_has_offsets_is_deleted(shard: Shard):
    asked = {"group": GROUP, "topic": TOPIC, "offsets": {"0": 3}}
    shard.host.call("commit_offsets", asked)
    ended = end_group(shard)
    assert (ended["existed"], ended["topics"]) == (False, [TOPIC])
    assert end_group(shard)["topics"] == []


def test_numbers_of_so_many_deleted_groups_are_remembered():
    table = ClaimTable()
    for each in range(ENDED_MAX + 1):
        table.apply(CLAIM, ended_value(f"g{each}", each + 1))
    assert table.claim_of("g0", "t", 0) == (0, "")
    assert table.claim_of("g1", "t", 0) == (2, "")
    again = ClaimTable()
    for kind, value in table.records():
        again.apply(kind, value)
    assert again.ended == table.ended


def test_times_of_claims_are_in_snapshots_and_end_with_the_group():
    table = ClaimTable()
    table.apply(CLAIM, claim_value("g", "t", {0: Claim(1, "a")}, 7))
    table.apply(CLAIM, claim_value("g", "t", {1: Claim(2, "a")}, 5))
    table.apply(CLAIM, claim_value("h", "t", {0: Claim(3, "a")}))
    again = ClaimTable()
    for kind, value in table.records():
        again.apply(kind, value)
    assert again.times_ms == table.times_ms == {("g", "t"): 7}
    again.apply(CLAIM, ended_value("g", 4))
    assert again.times_ms == {}


def test_times_and_deletions_of_offsets_are_in_snapshots():
    state = ShardState()
    state.apply_state_record("OFFSETS", offsets_body("g", "t", {0: 1}, 7))
    state.apply_state_record("OFFSETS", offsets_body("g", "t", {1: 2}, 5))
    state.apply_state_record("OFFSETS", offsets_body("h", "t", {0: 1}))
    state.apply_state_record("OFFSETS", offsets_body("i", "t", {0: 1}, 9))
    state.apply_state_record("OFFSETS", no_offsets_body("i", "t"))
    again = ShardState()
    for body in state.snapshot(1 << 20):
        again.apply_state_record("SNAPSHOT", body)
    assert again.offsets == state.offsets == {("g", "t"): {0: 1, 1: 2}, ("h", "t"): {0: 1}}
    assert again.offset_times_ms == state.offset_times_ms == {("g", "t"): 7}


# --- what time ends -------------------------------------------------------------------------------


@pytest.fixture
def let_pass(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let the believed wall clock be so many days later than the newest message."""

    def let_pass(days: float) -> None:
        now_ms = leader_of(shard.host).store.state.store_time_ms + int(days * DAY_MS)
        for module in (group_records, group_service):
            monkeypatch.setattr(module, "believed_ms", lambda store: now_ms)

    return let_pass


def forget(shard: Shard) -> list[str]:
    return leader_of(shard.host).groups.forget_unused()


def test_an_unused_group_is_forgotten_and_the_log_says_so(shard: Shard, caplog, let_pass):
    member = ready_member(shard)
    member.commit({0: 4})
    release(shard, member)
    leave(member)
    let_pass(29)
    assert forget(shard) == []
    let_pass(31)
    with caplog.at_level(logging.INFO, logger="raymq.commit_log"):
        assert forget(shard) == [GROUP]
    assert f"(group_expiry_hours): {GROUP}" in caplog.text
    assert forget(shard) == []
    nothing = {"coordinated": {}, "clients": {}, "paused": [], "with_offsets": [], "workers": []}
    nothing["paused_workers"] = {}
    assert shard.host.call("groups", {}) == nothing
    reopen(shard)
    assert committed(shard.host) == {}
    assert len(member.claim()["fenced"]) == QUEUES


def test_a_group_that_finds_no_message_every_night_is_kept(shard: Shard, let_pass):
    member = ready_member(shard)
    member.commit({0: 4})
    release(shard, member)
    leave(member)
    for day in (20, 40, 60):
        let_pass(day)
        # A job that reads nothing: it commits the same offset, or none.
        member = ready_member(shard)
        member.commit({0: 4})
        release(shard, member)
        leave(member)
        let_pass(day + 15)
        assert forget(shard) == []
        leader_of(shard.host).store.begin_next_file()
        reopen(shard)
        assert forget(shard) == []
    assert committed(shard.host) == {"0": 4}
    let_pass(91)
    assert forget(shard) == [GROUP]


def test_a_group_that_is_only_idle_is_kept(shard: Shard, let_pass):
    member = ready_member(shard, session_timeout_ms=30 * 60_000)
    member.commit({0: 4})
    let_pass(400)
    assert forget(shard) == []
    assert committed(shard.host) == {"0": 4}


def test_offsets_of_a_member_that_was_killed_outlive_its_group(shard: Shard, let_pass):
    member = ready_member(shard, session_timeout_ms=1_000)
    member.commit({0: 4})
    groups = leader_of(shard.host).store.groups.groups
    until(lambda: not groups[GROUP].members, lambda: threading.Event().wait(0.02))
    let_pass(31)
    assert forget(shard) == [GROUP]
    assert committed(shard.host) == {"0": 4}
    assert shard.host.call("groups", {})["with_offsets"] == [GROUP]


def test_offsets_without_a_member_are_forgotten_by_their_last_commit(shard: Shard, let_pass):
    asked = {"group": GROUP, "topic": TOPIC, "offsets": {"0": 3}}
    shard.host.call("commit_offsets", asked)
    let_pass(31)
    shard.host.call("commit_offsets", asked)
    assert forget(shard) == []
    let_pass(62)
    leader_of(shard.host).store.commit_offsets("other", TOPIC, {0: 1})
    assert forget(shard) == [GROUP]
    assert shard.host.call("groups", {})["with_offsets"] == ["other"]
