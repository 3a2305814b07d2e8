"""What one replica says of itself to those that connect to it."""

from __future__ import annotations

from typing import Any

from raymq.store.engine.message_store import MessageStore
from raymq.store.state.shard_state import SHARDS


class ReplicaIdentity:
    """The facts of one replica. Callers: any thread."""

    def __init__(self, facts: dict[str, Any], store: MessageStore) -> None:
        """Args: `facts`: those that its process was started with."""
        self._facts = facts
        self._store = store
        #: the number of its shard
        self.shard = int(facts["shard"])

    def facts(self) -> dict[str, Any]:
        """Cluster id, shard, number of shards and this process's incarnation."""
        facts = dict(self._facts)
        if "shards" in facts:
            # The actor keeps the number of its start, also when Ray restarts it.
            facts["shards"] = max(facts["shards"], self._joined_shards())
        if facts.get("joining"):
            facts["joining"] = self.is_joining()
        return facts

    def _joined_shards(self) -> int:
        """How many shards the log names since some were added; 0: none were."""
        return int(self._store.state.progress.get(SHARDS, {}).get("joined", 0))

    def is_joining(self) -> bool:
        """Whether this shard was added, and may lack topics."""
        facts = self._facts
        return bool(facts.get("joining")) and self._joined_shards() <= int(facts["shard"])
