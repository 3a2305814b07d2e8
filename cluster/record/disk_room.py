"""Whether the disks of a cluster have room for the files of replicas that are about to be made.

Each replica's directory may be a mount point.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from raymq.store.base.errors import StorageFull
from raymq.store.base.files import Files

from .cluster_record import ClusterRecord
from .paths import ClusterPaths, nearest_existing

MIB = 1 << 20


class Disk(NamedTuple):
    """A disk with replicas of this machine."""

    #: the directory of the first one, or the nearest above it that exists
    place: Path
    replicas: int
    #: for this user
    free_bytes: int


def disks_of(
    paths: ClusterPaths, record: ClusterRecord, files: Files, *, before: ClusterRecord | None = None
) -> list[Disk]:
    """The disks of all replicas, none for a cluster over nodes. Raises: OSError.

    Args: `before`: leave out the replicas of this record.
    """
    if record.nodes is not None:
        return []
    found: dict[int, Disk] = {}
    for shard in range(record.shards):
        for replica in range(record.replicas):
            if before is not None and shard < before.shards and replica < before.replicas:
                continue
            place = nearest_existing(paths.replica(shard, replica), files)
            device = os.stat(place).st_dev
            known = found.get(device) or Disk(place, 0, files.free_bytes(place))
            found[device] = known._replace(replicas=known.replicas + 1)
    return list(found.values())


def check_room(
    paths: ClusterPaths, record: ClusterRecord, files: Files, *, before: ClusterRecord | None = None
) -> None:
    """Check the disks of the replicas that are about to be made. Args: as of `disks_of`.

    Raises: StorageFull for a disk without room for the first commit log file of each of them.
    """
    for disk in disks_of(paths, record, files, before=before):
        needed = disk.replicas * record.segment_size_bytes
        if disk.free_bytes < needed:
            raise StorageFull(
                f"the disk of {disk.place} has {disk.free_bytes // MIB:,} MiB free, and the first files of"
                f" {disk.replicas} replica(s) take {needed // MIB:,} MiB: free some, choose another disk, or begin a"
                " cluster with smaller files (--segment-size-bytes)",
                path=str(disk.place),
                limit=needed,
                found=disk.free_bytes,
            )
