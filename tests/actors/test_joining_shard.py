"""A shard that is added, and the notes by which all shards count it: in the log, so that a restart keeps them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raymq.actors.replica import open_replica
from raymq.actors.supervise.replica_host import ReplicaHost
from raymq.store.base.errors import Rejected, TopicOnOtherShards, Unavailable
from raymq.store.config.store_config import StoreConfig
from tests.support.served_shard import SEGMENT_BYTES

#: a receipt waits for no satellite
CONFIG = StoreConfig(
    segment_size_bytes=SEGMENT_BYTES, prewrite_window_bytes=64 * 1024, flush="async"
)
TOPIC = {"name": "t", "queues": 2, "shards": [0, 1]}

Open = Callable[..., ReplicaHost]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Opens the store of a shard, after it was closed."""
    hosts: list[ReplicaHost] = []

    def open_shard(**identity: Any) -> ReplicaHost:
        for host in hosts:
            host.close(1.0)
        hosts.clear()
        facts = {"cluster_id": "5e" * 16, "name": "c", "joining": False, **identity}
        hosts.append(open_replica(tmp_path, CONFIG, identity=facts, roles=("flush_real_time",)))
        return hosts[0]

    yield open_shard
    for host in hosts:
        host.close(1.0)


def test_a_shard_that_is_added_answers_for_all_only_when_it_has_every_topic(opened: Open) -> None:
    new = {"shard": 1, "shards": 2, "joining": True}
    host = opened(**new)
    assert host.call("create_topic", TOPIC) == {"created": True, "shards": 2}
    host.call("note_shards", {"known": 2, "joined": 1})
    for op in ("describe", "routes", "replicas", "topics"):
        with pytest.raises(Unavailable, match="being added") as caught:
            host.call(op, {})
        assert caught.value.retriable
    assert host.call("status", {})["joining"] is True
    assert host.call("leader", {})["replica"] == 0

    host.call("note_shards", {"known": 2, "joined": 2})
    assert list(host.call("topics", {})) == ["t"]
    # Ray starts the process again with the facts of its first start.
    host = opened(**new)
    assert host.call("describe", {})["joining"] is False
    assert list(host.call("topics", {})) == ["t"]


def test_an_old_shard_counts_the_new_one_from_its_note_on_and_after_a_restart(opened: Open) -> None:
    old = {"shard": 0, "shards": 1}
    host = opened(**old)
    with pytest.raises(Rejected, match="shards"):
        host.call("create_topic", TOPIC)

    attributes = {"cleanup.policy": "COMPACTION"}
    host.call("create_topic", {"name": "c", "queues": 1, "shards": [0], "attributes": attributes})
    facts = {"queues": 1, "shards": [0], "attributes": attributes}
    facts |= {"former_queues": [], "hidden_queues": 0}
    assert host.call("note_shards", {"known": 2, "joined": 1}) == {"topics": {"c": facts}}
    # It takes topics of callers that count the new shard already, and sends no other caller there.
    assert host.call("create_topic", TOPIC) == {"created": True, "shards": 1}
    assert host.call("describe", {})["shards"] == 1

    assert set(host.call("note_shards", {"known": 2, "joined": 2})["topics"]) == {"c", "t"}
    assert host.call("create_topic", TOPIC) == {"created": False, "shards": 2}
    # A caller that is older than the new shard is told where a new topic must be.
    with pytest.raises(TopicOnOtherShards) as caught:
        host.call("create_topic", {"name": "n", "queues": 1, "shards": [0], "on_all": True})
    assert (caught.value.field, caught.value.shards) == ("shards", [0, 1])
    # An older note that comes late changes nothing.
    host.call("note_shards", {"known": 2, "joined": 1})
    host = opened(**old)
    for op in ("describe", "status"):
        assert host.call(op, {})["shards"] == 2
    assert host.call("create_topic", TOPIC) == {"created": False, "shards": 2}


def test_notes_that_cannot_be_are_refused(opened: Open) -> None:
    host = opened(shard=0, shards=1)
    for known, joined, field in ((257, 1, "known"), (0, 0, "known"), (2, 3, "joined")):
        with pytest.raises(Rejected) as caught:
            host.call("note_shards", {"known": known, "joined": joined})
        assert caught.value.field == field
    assert host.call("describe", {})["shards"] == 1
