"""Locks of queues over a real store, as servers of RocketMQ's clients take them; and their clients in groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from raymq.actors.leader import lock_times
from raymq.actors.leader.lock_times import LOCK_EXPIRY_MS, LockTimes
from raymq.actors.server.ray.ray_methods import RayMethods
from raymq.store.base.errors import Rejected, TopicMissing
from raymq.store.groups.foreign_members import FOREIGN_HOLD_MS, ForeignClient, ForeignMembers
from tests.actors.test_commit_log_host import Shard
from tests.actors.test_group_service import GROUP, TOPIC, committed, member_of, put_messages, reopen
from tests.support.clock import ManualClock
from tests.support.roles import leader_of


@pytest.fixture
def shard(tmp_path) -> Iterator[Shard]:
    made = Shard(tmp_path / "store")
    made.open()
    made.start_flusher()
    made.host.call("create_topic", {"name": TOPIC, "queues": 4, "shards": [0]})
    yield made
    made.close()
    for flusher in made.flushers:
        flusher.kill()
        flusher.wait()


def with_clock(shard: Shard) -> ManualClock:
    """Let a test say when locks end."""
    clock = ManualClock()
    leader_of(shard.host).claims._locks = LockTimes(clock)
    return clock


def take_number(shard: Shard, queues: list[int], *, force: bool = False) -> int:
    asked = {"group": GROUP, "queues": {TOPIC: queues}, "force": force}
    number: int = shard.host.call("take_group_number", asked)["number"]
    return number


def lock(shard: Shard, client: str, queues: list[int], number: int | None = None) -> Any:
    """Returns: the locked queues, and the free ones."""
    asked = {"group": GROUP, "topic": TOPIC, "client": client, "queues": queues}
    found = shard.host.call("lock_queues", asked if number is None else {**asked, "number": number})
    return found["locked"], found["free"]


def take(shard: Shard, client: str, queues: list[int]) -> list[int]:
    """Lock as a server does."""
    locked: list[int] = lock(shard, client, queues, take_number(shard, queues))[0]
    return locked


def unlock(shard: Shard, client: str, queues: list[int]) -> None:
    asked = {"group": GROUP, "topic": TOPIC, "client": client, "queues": queues}
    shard.host.call("unlock_queues", asked)


def commit(shard: Shard, offsets: dict[int, int], client: str | None = None) -> Any:
    """Returns: the refused queues, each with its claim."""
    table = {str(queue_id): offset for queue_id, offset in offsets.items()}
    asked: dict[str, Any] = {"group": GROUP, "topic": TOPIC, "offsets": table}
    if client is None:
        return shard.host.call("commit_offsets", asked)
    clients = dict.fromkeys(table, client)
    return shard.host.call("commit_offsets", {**asked, "clients": clients})["fenced"]


def test_a_free_queue_is_named_first_and_locked_under_a_number(shard: Shard) -> None:
    assert lock(shard, "a", [0, 1]) == ([], [0, 1])
    assert take(shard, "a", [0, 1]) == [0, 1]
    assert lock(shard, "a", [0, 1, 2]) == ([0, 1], [2])
    # Those of another client are neither, also under a newer number.
    assert lock(shard, "b", [0, 1, 2]) == ([], [2])
    assert take(shard, "b", [0, 1, 2]) == [2]


def test_a_lock_is_renewed_without_a_record(shard: Shard) -> None:
    clock = with_clock(shard)
    assert take(shard, "a", [0]) == [0]
    end = shard.host.store.log.end
    for _ in range(4):
        clock.advance(LOCK_EXPIRY_MS - 1)
        assert lock(shard, "a", [0]) == ([0], [])
        assert lock(shard, "b", [0]) == ([], [])
    assert shard.host.store.log.end == end


def test_a_lock_that_is_not_renewed_is_over_and_its_client_may_still_renew_it(shard: Shard) -> None:
    clock = with_clock(shard)
    assert take(shard, "a", [0, 1]) == [0, 1]
    clock.advance(LOCK_EXPIRY_MS)
    assert lock(shard, "b", [0, 1]) == ([], [0, 1])
    assert lock(shard, "a", [1]) == ([1], [])
    assert take(shard, "b", [0, 1]) == [0]
    assert lock(shard, "a", [0, 1]) == ([1], [])


def test_an_old_number_does_not_lock(shard: Shard) -> None:
    clock = with_clock(shard)
    stale = take_number(shard, [0])
    assert take(shard, "a", [0]) == [0]
    clock.advance(LOCK_EXPIRY_MS)
    assert lock(shard, "b", [0], stale) == ([], [])


def test_a_lock_survives_a_new_leader_which_counts_from_its_begin(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert take(shard, "a", [0, 1]) == [0, 1]
    unlock(shard, "a", [1])
    reopen(shard)
    assert lock(shard, "b", [0, 1]) == ([], [1])
    assert lock(shard, "a", [0]) == ([0], [])
    monkeypatch.setattr(lock_times, "LOCK_EXPIRY_MS", 0)
    assert lock(shard, "b", [0]) == ([], [0])


def test_only_the_client_that_has_a_lock_ends_it(shard: Shard) -> None:
    assert take(shard, "a", [0]) == [0]
    unlock(shard, "b", [0, 1])
    assert lock(shard, "a", [0]) == ([0], [])
    unlock(shard, "a", [0, 1])
    assert lock(shard, "b", [0]) == ([], [0])


def test_the_commit_of_a_client_that_has_lost_its_lock_is_refused(shard: Shard) -> None:
    clock = with_clock(shard)
    put_messages(shard.host, 5)
    assert take(shard, "a", [0, 1]) == [0, 1]
    assert commit(shard, {0: 1, 1: 1, 2: 1}, "a") == {}
    number = take_number(shard, [0])
    # Not before the lock is over.
    assert commit(shard, {0: 4}, "b")["0"][1] == "rocketmq:a"
    clock.advance(LOCK_EXPIRY_MS)
    assert lock(shard, "b", [0], number) == ([0], [])
    assert commit(shard, {0: 3}, "b") == {}
    # What else it commits is stored.
    assert commit(shard, {0: 2, 1: 2}, "a") == {"0": [number, "rocketmq:b"]}
    assert committed(shard.host) == {"0": 3, "1": 2, "2": 1}


def test_others_commit_to_a_queue_whose_lock_is_over(shard: Shard) -> None:
    clock = with_clock(shard)
    put_messages(shard.host, 5)
    assert take(shard, "a", [0]) == [0]
    with pytest.raises(Rejected, match="locked for group billing by a client of RocketMQ"):
        commit(shard, {0: 1})
    assert commit(shard, {0: 1}, "") == {"0": [1, "rocketmq:a"]}
    # A tool of an operator sets it.
    table = {"group": GROUP, "topic": TOPIC, "offsets": {"0": 0}, "clients": {"0": None}}
    assert shard.host.call("commit_offsets", table) == {"fenced": {}}
    clock.advance(LOCK_EXPIRY_MS)
    assert commit(shard, {0: 1}) == {}
    assert commit(shard, {0: 2}, "b") == {}
    assert commit(shard, {0: 3}, "a") == {}
    assert committed(shard.host) == {"0": 3}


def test_a_queue_of_a_member_is_not_locked_until_the_member_has_left(shard: Shard) -> None:
    put_messages(shard.host, 5)
    member = member_of(shard)
    member.beat()
    member.claim()
    assert lock(shard, "a", [0]) == ([], [0])
    with pytest.raises(Rejected, match="have these queues"):
        take_number(shard, [0])
    assert commit(shard, {0: 1}, "a")["0"][1] == member.id
    numbers = dict(member.numbers)
    member.beat(is_leaving=True)
    # It was killed before it ended its claims.
    assert take(shard, "a", [0]) == [0]
    member.numbers = numbers
    assert member.commit({0: 5})["fenced"]["0"][1] == "rocketmq:a"


def test_a_member_that_joins_later_takes_a_lock_away(shard: Shard) -> None:
    put_messages(shard.host, 5)
    assert take(shard, "a", [0]) == [0]
    assert commit(shard, {0: 2}, "a") == {}
    member = member_of(shard)
    member.beat()
    assert member.claim()["offsets"] == {"0": 2}
    assert commit(shard, {0: 3}, "a")["0"][1] == member.id
    assert lock(shard, "a", [0]) == ([], [0])


def test_locks_of_a_topic_that_does_not_exist_are_refused(shard: Shard) -> None:
    for op in ("lock_queues", "unlock_queues"):
        asked = {"group": GROUP, "topic": "nope", "client": "a", "queues": [0]}
        if op == "lock_queues":
            with pytest.raises(TopicMissing):
                shard.host.call(op, asked)
        else:
            # What is gone has no lock.
            assert shard.host.call(op, asked) == {}


def test_the_methods_of_the_actor_take_locks_too(shard: Shard) -> None:
    methods = RayMethods(shard.host)
    asked = {"group": GROUP, "topic": TOPIC, "client": "a", "queues": [0]}
    taken = methods.call(
        "c", "take_group_number", {"group": GROUP, "queues": {TOPIC: [0]}, "force": False}
    )
    found = methods.call("c", "lock_queues", {**asked, **taken})
    assert found == {"locked": [0], "free": []}
    assert methods.call("c", "unlock_queues", asked) == {}
    assert methods.call("c", "queue_locks", {"group": GROUP, "topic": TOPIC}) == {}
    word = {"protocol": "RocketMQ", "server": "s", "groups": {GROUP: [list(foreign_client("a"))]}}
    found = methods.call("c", "note_foreign_members", word)
    assert found == {"with_members": {}, "resets": []}
    reset = {"group": GROUP, "number": 2, "offsets": {TOPIC: {"0": 1}}}
    assert methods.call("c", "notify_reset", reset) == {"clients": ["a"]}


def test_times_of_locks_that_are_over_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_times, "KEPT_MAX", 10)
    clock = ManualClock()
    times = LockTimes(clock)
    for queue_id in range(100):
        clock.advance(LOCK_EXPIRY_MS // 5)
        times.renew("g", "t", [queue_id])
        assert len(times._renewed_ms) <= 11
    assert times.is_over("g", "t", 94)
    assert not times.is_over("g", "t", 96)


def test_an_unused_group_with_a_lock_that_is_over_is_forgotten(shard: Shard) -> None:
    clock = with_clock(shard)
    put_messages(shard.host, 1)
    assert take(shard, "a", [0]) == [0]
    commit(shard, {0: 1}, "a")
    claims = leader_of(shard.host).claims
    assert claims.forget_unused(1 << 60) == []
    clock.advance(LOCK_EXPIRY_MS)
    assert claims.forget_unused(1 << 60) == [GROUP]
    # This answer waits for the records before it.
    assert lock(shard, "b", [0]) == ([], [0])
    assert committed(shard.host) == {}


# --- clients of RocketMQ in groups ----------------------------------------------------------------


def foreign_client(name: str, since_ms: int = 0) -> ForeignClient:
    return ForeignClient(name, "10.0.0.1:5000", "JAVA", "5.3.3", since_ms)


def word_of(shard: Shard, clients: list[str], server: str = "s") -> Any:
    groups = {GROUP: [list(foreign_client(each)) for each in clients], "other": []}
    word = {"protocol": "RocketMQ", "server": server, "groups": groups}
    return shard.host.call("note_foreign_members", word)


def note(shard: Shard, clients: list[str], server: str = "s") -> Any:
    return word_of(shard, clients, server)["with_members"]


def test_a_member_does_not_join_clients_of_rocketmq(shard: Shard) -> None:
    assert note(shard, ["10.0.0.1@7", "10.0.0.2@7"]) == {}
    assert note(shard, ["10.0.0.1@7"], "another server") == {}
    refused = member_of(shard).beat()["error"]
    assert refused["kind"] == "Rejected"
    assert "clients of RocketMQ consume in group billing, such as 10.0.0.1@7, 10.0.0.2@7." in str(
        refused["message"]
    )
    assert "stop these clients first; or use another group, or queues=" in refused["message"]
    note(shard, [])
    assert "10.0.0.1@7." in member_of(shard).beat()["error"]["message"]
    note(shard, [], "another server")
    member = member_of(shard)
    assert sorted(member.numbers or member.beat()["assignment"][TOPIC][0]) == [0, 1, 2, 3]


def test_members_that_were_first_stay_and_are_named(shard: Shard) -> None:
    first = member_of(shard, client="worker-1:77")
    first.beat()
    assert note(shard, ["10.0.0.1@7"]) == {GROUP: ["worker-1:77"]}
    second = member_of(shard, client="worker-2:78")
    second.beat()
    first.beat()
    assert note(shard, ["10.0.0.1@7"]) == {GROUP: ["worker-1:77", "worker-2:78"]}
    for member in (first, second):
        member.beat(is_leaving=True)
    assert note(shard, ["10.0.0.1@7"]) == {}
    assert "RocketMQ" in member_of(shard).beat()["error"]["message"]


def test_a_group_is_described_with_its_clients_of_rocketmq_and_their_locks(shard: Shard) -> None:
    clock = with_clock(shard)
    note(shard, ["a", "b"])
    note(shard, ["b", "c"], "another server")
    assert take(shard, "a", [1]) == [1]
    clock.advance(2_500)
    assert take(shard, "b", [2]) == [2]
    described = shard.host.call("describe_group", {"group": GROUP})["clients"]
    assert [each["client"] for each in described] == ["a", "b", "c"]
    assert described[0] == {"protocol": "RocketMQ", **foreign_client("a")._asdict()}
    assert shard.host.call("groups", {})["clients"] == {GROUP: 3}
    asked = {"group": GROUP, "topic": TOPIC}
    assert shard.host.call("queue_locks", asked) == {"1": ["a", 2_500], "2": ["b", 0]}
    # A lock that is over refuses no request, and is not shown.
    clock.advance(LOCK_EXPIRY_MS - 2_500)
    assert shard.host.call("queue_locks", asked) == {"2": ["b", LOCK_EXPIRY_MS - 2_500]}


def test_each_client_hears_of_a_reset_from_one_server(shard: Shard) -> None:
    word_of(shard, ["a", "b"])
    word_of(shard, ["b", "c"], "another server")
    reset = {"group": GROUP, "number": 7, "offsets": {TOPIC: {"0": 1, "3": 0}}}
    assert shard.host.call("notify_reset", reset) == {"clients": ["a", "b", "c"]}
    # An answer may be lost, so that the next one has it too.
    for _ in range(2):
        own = [word_of(shard, [], each)["resets"] for each in ("s", "another server", "a third")]
        assert own[2] == []
        assert [[{**each, "clients": []} for each in found] for found in own[:2]] == [
            [{**reset, "clients": []}]
        ] * 2
        assert sorted(own[0][0]["clients"] + own[1][0]["clients"]) == ["a", "b", "c"]


def test_resets_are_forgotten_with_time() -> None:
    foreign = ForeignMembers()
    foreign.note("RocketMQ", "s", {"g": [foreign_client("a")]}, 0)
    assert foreign.note_reset("g", 1, {"t": {0: 0}}, 10) == ["a"]
    assert foreign.note_reset("h", 1, {"t": {0: 0}}, 10) == []
    assert len(foreign.resets("s", FOREIGN_HOLD_MS)) == 1
    foreign.note("RocketMQ", "another server", {}, 2 * FOREIGN_HOLD_MS)
    assert foreign._resets == {}


def test_the_word_of_a_server_holds_for_a_while() -> None:
    foreign = ForeignMembers()
    clients = [foreign_client("a")]
    foreign.note("RocketMQ", "s", {"g": clients, "h": clients}, 0)
    foreign.note("RocketMQ", "s", {"g": clients}, 10_000)
    foreign.check_join("h", FOREIGN_HOLD_MS)
    with pytest.raises(Rejected):
        foreign.check_join("g", FOREIGN_HOLD_MS)
    foreign.check_join("g", FOREIGN_HOLD_MS + 10_000)
    foreign.note("RocketMQ", "s", {"i": []}, 2 * FOREIGN_HOLD_MS)
    assert foreign._words == {}
