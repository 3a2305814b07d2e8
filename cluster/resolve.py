"""Where shards listen now: what a client asks after a connection broke. Both resolvers pickle."""

from __future__ import annotations

import json
from dataclasses import dataclass

from raymq.store.files import Files

from .paths import ClusterPaths


@dataclass(frozen=True)
class FileResolver:
    """Reads the endpoint files: for programs on the cluster's machine, without Ray."""

    data_dir: str
    shards: int

    def __call__(self) -> dict[int, str]:
        """shard -> host:port of its leader as last written; a shard that never served is missing.

        On another machine the files are missing and so are all shards: the caller asks a shard
        instead.
        """
        paths, files = ClusterPaths(self.data_dir), Files()
        routes: dict[int, str] = {}
        for shard in range(self.shards):
            try:
                facts = json.loads(files.read_file(paths.endpoint(shard, 0)))
                routes[shard] = f"{facts['host']}:{int(facts['port'])}"
            except (OSError, ValueError, KeyError, TypeError):
                continue
        return routes


@dataclass(frozen=True)
class RayResolver:
    """Asks the shards' actors: for programs that reach the cluster through Ray."""

    address: str
    name: str
    shards: int

    def __call__(self) -> dict[int, str]:
        """shard -> host:port of its leader; a shard that does not serve now is missing."""
        # Imported on use: clients of a local data directory or of raymq:// never load Ray.
        from . import actor_set
        from .ray_host import RayTarget, session

        with session(RayTarget(address=self.address)) as ray:
            return actor_set.endpoints(ray, self.name, self.shards)
