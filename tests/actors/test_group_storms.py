"""Many members at once over a real store: restarts of all instances, and the limit of a group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.actors.test_commit_log_host import Shard
from tests.support.group_members import RawMember
from tests.support.waiting import until

GROUP, TOPIC = "billing", "orders"
STATIC, OTHERS = 100, 50
#: two for each
QUEUES = 2 * (STATIC + OTHERS)


@pytest.fixture
def shard(tmp_path) -> Iterator[Shard]:
    made = Shard(tmp_path / "store")
    made.open()
    made.start_flusher()
    made.host.call("create_topic", {"name": TOPIC, "queues": QUEUES, "shards": [0]})
    yield made
    made.close()
    for flusher in made.flushers:
        flusher.kill()
        flusher.wait()


def beat_together(shard: Shard, members: Sequence[RawMember], **fields: Any) -> list[Any]:
    """All send a heartbeat in one call, and apply their answers."""
    beats = [each.next_beat(**fields) for each in members]
    answers: list[Any] = shard.host.call("group_beat", {"beats": beats})["answers"]
    for member, answer in zip(members, answers, strict=True):
        member.take(answer)
    return answers


def started(shard: Shard, count: int, *, session_ms: int, name: str = "") -> list[RawMember]:
    """Members that have not joined yet. Args: `name`: of their instances, which are numbered; empty: they have none."""
    return [
        RawMember(
            shard.host.call,
            GROUP,
            TOPIC,
            session_timeout_ms=session_ms,
            instance_id=f"{name}-{number}" if name else "",
        )
        for number in range(count)
    ]


def heard_nothing(answers: Sequence[Any]) -> bool:
    return not any("assignment" in each or "error" in each for each in answers)


def test_a_restart_of_100_static_members_moves_no_queue(shard: Shard) -> None:
    static = started(shard, STATIC, session_ms=60_000, name="pod")
    others = started(shard, OTHERS, session_ms=60_000)
    beat_together(shard, [*static, *others])
    assert {len(each.numbers) for each in (*static, *others)} == {2}
    before = [set(each.numbers) for each in static]

    for each in static:
        # It has stopped to read.
        each.numbers = {}
    beat_together(shard, static, keeps_place=True)
    assert heard_nothing(beat_together(shard, others))
    again = started(shard, STATIC, session_ms=60_000, name="pod")
    beat_together(shard, again)
    assert [set(each.numbers) for each in again] == before
    assert heard_nothing(beat_together(shard, others))


def test_a_restart_of_100_static_members_that_were_killed_moves_no_queue_of_the_others(
    shard: Shard,
) -> None:
    static = started(shard, STATIC, session_ms=1_000, name="pod")
    others = started(shard, OTHERS, session_ms=60_000)
    beat_together(shard, [*static, *others])
    before = [set(each.numbers) for each in static]

    again = started(shard, STATIC, session_ms=60_000, name="pod")
    beat_together(shard, again)
    assert not any(each.numbers for each in again), "the killed ones may still read"
    assert heard_nothing(beat_together(shard, others))
    until(
        lambda: [set(each.numbers) for each in again] == before, lambda: beat_together(shard, again)
    )
    assert heard_nothing(beat_together(shard, others))


def test_the_member_after_the_last_one_of_a_group_is_refused(shard: Shard) -> None:
    members = started(shard, 2_001, session_ms=60_000)
    assert not any("error" in each for each in beat_together(shard, members[:2_000]))
    (answer,) = beat_together(shard, members[2_000:])
    assert answer["error"]["kind"] == "Rejected"
    assert "the limit is 2000" in answer["error"]["message"]
    beat_together(shard, members[:1], is_leaving=True)
    assert "error" not in members[2_000].beat()
