"""What operations have in common: the record, the Ray, the deadline, and actors as the record says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raymq.cluster.deploy import actor_states
from raymq.cluster.operations.context import OperationCall
from raymq.cluster.record.cluster_record import load_record, save_record
from raymq.cluster.record.paths import ClusterPaths
from raymq.store.base.errors import Rejected, Unavailable
from raymq.store.base.files import Files
from tests.cluster.test_replace_replica import record
from tests.support.clock import ManualClock
from tests.support.fake_ray import FakeRay


def call(data_dir: Path, timeout_s: float = 60.0) -> OperationCall:
    handle: Any = SimpleNamespace(
        data_dir=str(data_dir), name="default", token="t", ca=None, endpoints={}, placement=None
    )
    return OperationCall(handle, timeout_s=timeout_s, progress=None, clock=ManualClock())


def test_a_call_reads_the_record_and_writes_what_it_saves(tmp_path: Path) -> None:
    paths, first = ClusterPaths(tmp_path), record(replicas=3)
    save_record(paths, first, Files())
    operation = call(tmp_path)
    with operation.locked():
        assert operation.record == first
        operation.save(replace(first, drained_nodes=("a",)))
    assert load_record(paths, Files()) == operation.record == replace(first, drained_nodes=("a",))


def test_a_call_is_refused_without_a_record_and_without_the_ray_of_the_cluster(
    tmp_path: Path,
) -> None:
    operation = call(tmp_path)
    with pytest.raises(Rejected, match=r"has no cluster\.json"), operation.locked():
        pass
    save_record(ClusterPaths(tmp_path), record(), Files())
    absent = pytest.raises(Unavailable, match="does not run: raymq start")
    with operation.locked(), absent, operation.session():
        pass


def test_the_deadline_counts_from_the_last_time_that_it_was_set(tmp_path: Path) -> None:
    operation = call(tmp_path, timeout_s=60)
    operation.clock.sleep_ms(59_000)
    assert (operation.left_s, operation.is_late) == (1.0, False)
    operation.clock.sleep_ms(1_001)
    assert (operation.left_s, operation.is_late) == (0.0, True)
    operation.set_deadline(5)
    assert (operation.left_s, operation.is_late) == (5.0, False)


def test_a_deadline_is_extended_and_never_moved_nearer(tmp_path: Path) -> None:
    operation = call(tmp_path, timeout_s=60)
    operation.extend_deadline(30)
    assert operation.left_s == 60.0
    operation.clock.sleep_ms(50_000)
    operation.extend_deadline(30)
    assert operation.left_s == 30.0


def test_only_the_wanted_actors_of_a_record_are_made_and_those_that_run_are_kept(
    tmp_path: Path,
) -> None:
    ray, operation = FakeRay(), call(tmp_path)
    operation.ray, operation.record = ray, record(shards=2, replicas=3)
    operation.converge(lambda shard, replica, role: (shard, replica) == (1, 2))
    assert actor_states.missing(operation.record, ray.actors) == {
        key for key in actor_states.missing(operation.record, ()) if key[:2] != (1, 2)
    }

    kept = dict(ray.actors)
    members = operation.converge(lambda *key: True)
    assert len(members) == len(ray.actors) == len(actor_states.missing(operation.record, ()))
    assert kept.items() <= ray.actors.items()
    assert ray.events == []
