"""The metrics of a controller. Those of one shard that its leader knows are in actors/leader/metrics.py."""

from __future__ import annotations

from raymq.actors.leader.metrics import Metric

_COMMON = ("cluster",)

CONTROLLER_METRICS = (
    Metric(
        "raymq_shards_without_leader",
        "gauge",
        "Shards that no replica leads now.",
        common=_COMMON,
    ),
    Metric(
        "raymq_shard_without_leader_seconds",
        "gauge",
        "For how long no replica has led a shard; 0 while one does.",
        ("shard",),
        _COMMON,
    ),
    Metric(
        "raymq_under_replicated_shards",
        "gauge",
        "Shards of which a replica is down, not complete, or lags.",
        common=_COMMON,
    ),
    Metric(
        "raymq_down_replicas",
        "gauge",
        "Replicas that do not answer, start, or refuse to write.",
        common=_COMMON,
    ),
    Metric(
        "raymq_incomplete_replicas",
        "gauge",
        "Replicas that run and lack confirmed messages.",
        common=_COMMON,
    ),
    Metric(
        "raymq_leader_changes_total",
        "counter",
        "How often another replica has taken over a shard.",
        ("shard",),
        _COMMON,
    ),
    Metric(
        "raymq_controller_restarts_total",
        "counter",
        "Actors that the controller has made again, because Ray had forgotten them.",
        common=_COMMON,
    ),
    Metric(
        "raymq_controller_moves_total",
        "counter",
        "Leaderships that the controller has asked to give back.",
        common=_COMMON,
    ),
)
