"""Finds the present endpoints of shards, after a connection broke. Both resolvers can be pickled."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass

from raymq.actors.ray.replica_files import read_endpoint, read_led_epoch
from raymq.cluster.record.paths import ClusterPaths
from raymq.store.base.files import Files


@dataclass(frozen=True)
class FileResolver:
    """Reads the endpoint files: for programs on the cluster's machine, without Ray."""

    data_dir: str

    def __call__(self) -> dict[int, str]:
        """Shard -> host:port of its leader as last written. A shard that never served is missing.

        On another machine there are no files, so all shards are missing and the caller asks a shard instead.
        """
        paths = ClusterPaths(self.data_dir)
        routes: dict[int, str] = {}
        # As many as there are now: a handle may be older than some.
        for shard in paths.shards(Files()):
            with contextlib.suppress(OSError, KeyError, TypeError):
                endpoint = read_endpoint(paths.replica(shard, _leader(paths, shard)))
                if endpoint is not None:
                    routes[shard] = endpoint
        return routes


def _leader(paths: ClusterPaths, shard: int) -> int:
    """The replica that led a shard last, by the epoch that each wrote. Raises: OSError."""
    epochs: dict[int, int] = {}
    for entry in Files().list(paths.replica(shard, 0).parent):
        replica = entry.removeprefix("replica-")
        if replica != entry and replica.isdecimal():
            epoch = read_led_epoch(paths.replica(shard, int(replica)))
            if epoch is not None:
                epochs[int(replica)] = epoch
    return max(epochs, key=epochs.__getitem__, default=0)


@dataclass(frozen=True)
class RayResolver:
    """Asks the shards' actors: for programs that reach the cluster through Ray."""

    address: str
    name: str

    def __call__(self) -> dict[int, str]:
        """shard -> host:port of its leader. A shard that does not serve now is missing."""
        # Imported on use: clients of a local data directory or of raymq:// never load Ray.
        from . import actor_states
        from .ray_host import RayTarget, session

        with session(RayTarget(address=self.address)) as ray:
            return actor_states.endpoints(ray, self.name)


def save_endpoints(paths: ClusterPaths, endpoints: dict[int, str], files: Files) -> None:
    """Write the leaders' present endpoints, for `connect` on the machine of `start` without asking Ray."""
    body = {str(shard): endpoint for shard, endpoint in sorted(endpoints.items())}
    files.write_file_atomic(paths.endpoints, json.dumps(body).encode())


def load_endpoints(paths: ClusterPaths, files: Files) -> dict[int, str]:
    """The endpoints that `save_endpoints` wrote, possibly outdated; empty before the end of the first start."""
    try:
        body = json.loads(files.read_file(paths.endpoints))
        return {int(shard): str(endpoint) for shard, endpoint in body.items()}
    except (OSError, ValueError, AttributeError):
        return {}
