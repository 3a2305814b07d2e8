"""When a cluster may restart one replica after the other, and in which order."""

from __future__ import annotations

from typing import Any

import pytest

from raymq.cluster.operations.rolling_restart import _order, check_can_restart, check_whole
from raymq.store.base.errors import Rejected, Unavailable
from tests.cluster.test_replace_replica import SILENT, record, rows


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_shard_that_cannot_do_without_a_replica_is_refused(replicas: int) -> None:
    with pytest.raises(Rejected, match=r"raymq stop.*raymq start"):
        check_can_restart(record(replicas=replicas))


@pytest.mark.parametrize("replicas", [3, 5])
def test_a_shard_with_failover_restarts(replicas: int) -> None:
    check_can_restart(record(replicas=replicas))


def test_the_leader_comes_last() -> None:
    assert _order(rows()) == [1, 2, 0]
    assert _order(rows(r0={"mode": "follower"}, r1={"mode": "leader"})) == [0, 2, 1]


@pytest.mark.parametrize("other", [SILENT, {"is_complete": False}, {"state": "READ_ONLY"}])
def test_no_replica_ends_while_another_one_does_not_count(other: dict[str, Any]) -> None:
    check_whole(rows())
    with pytest.raises(Unavailable, match="replica 1 of shard 0 is") as caught:
        check_whole(rows(r1=other))
    assert caught.value.field == "replica"


def test_no_replica_ends_while_none_leads() -> None:
    with pytest.raises(Unavailable, match="no replica leads shard 0"):
        check_whole(rows(r0={"mode": "follower"}))
