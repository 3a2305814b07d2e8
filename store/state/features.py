"""The level of features that a shard's log has used: which versions of RayMQ may write to it.

A version ignores records of kinds that it does not know, and its snapshots would lose what they say. So a record of the
level comes before the first record of such a kind, and a version refuses a log of a higher level than its own. In a
running shard all replicas have one level: `replication.wire.VERSION` goes up with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raymq.store.base.errors import Rejected

#: in `ShardState.progress`: `level`, the highest one that was used
FEATURES = "features"
LEVEL = "level"
#: records of consumer groups: GROUP, MEMBER, CLAIM
GROUPS_LEVEL = 1
#: TOPIC records of deleted topics
DELETED_TOPICS_LEVEL = 2
#: records of leases: LEASE, SETTLE
LEASES_LEVEL = 3
#: ... and those that pause groups of workers
PAUSES_LEVEL = 4
#: what this version knows
KNOWN_LEVEL = PAUSES_LEVEL


def feature_level(progress: Mapping[str, Mapping[str, Any]]) -> int:
    """The level of a log; 0: no feature that needs one. Args: `progress`: of its state."""
    return int(progress.get(FEATURES, {}).get(LEVEL, 0))


def check_feature_level(progress: Mapping[str, Mapping[str, Any]], root: object) -> None:
    """Raises: Rejected for a log that needs a newer version. Args: `root`: the store's directory."""
    found = feature_level(progress)
    if found > KNOWN_LEVEL:
        raise Rejected(
            f"the log in {root} has records of feature level {found}, and this version knows {KNOWN_LEVEL}: start it "
            "with the newer version of RayMQ",
            field="feature level",
            limit=KNOWN_LEVEL,
            found=found,
        )
