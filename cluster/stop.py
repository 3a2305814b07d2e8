"""stop: ends a cluster's actors in order, and then Ray, if `start` started that Ray. Data stays."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from raymq.store.base.errors import AnotherRay, Rejected, Unavailable
from raymq.store.base.files import Files

from .controller import controller_actor
from .deploy import actor_end, actor_states, owned_ray, ray_host, run_sweep
from .deploy.ray_host import Progress, RayTarget
from .operations.context import DirectoryCall
from .record import cluster_record
from .record.cluster_record import ClusterRecord
from .record.paths import ClusterPaths, directory_lock
from .record.targets import local_paths


@dataclass(frozen=True, kw_only=True)
class StopReport:
    """The result of `stop`."""

    #: whether every shard closed in order: the next start then needs no recovery
    clean: bool
    #: actor name -> "closed", "not running", or why the actor was ended without an orderly close
    actors: dict[str, str] = field(default_factory=dict)
    #: "stopped", "left running" (`start` did not start it) or "not running"
    ray: str = "not running"


def stop(
    target: str | os.PathLike[str] | None = None,
    *,
    timeout_s: float = 60.0,
    progress: Progress | None = None,
) -> StopReport:
    """Stop the cluster of a data directory, or of a name known on this machine. No data is deleted.

    The actors flush, write a checkpoint and end, in order. Ray ends after them if `start` started it. A cluster that
    does not run is already stopped. The log is synced up to its end, so the next start needs no recovery.

    Example:
        ```python
        import raymq

        raymq.start("raymq-data").close()
        report = raymq.stop("raymq-data", timeout_s=30)
        print(report.clean, report.ray)
        ```

    Args:
        target: a data directory, or the name of a cluster that was started on this machine. None (default) for the only
            cluster that this user started here.
        timeout_s: seconds that the orderly end of all actors may take (default 60). Then they are ended as a crash
            would end them: nothing acknowledged is lost, `clean` is False, and the next start recovers.
        progress: is called with one line for each step. Default: nothing is called.

    Raises:
        Rejected: `target` is not a cluster of this machine, or several clusters are known and `target` is None.
        Unavailable: a process cannot be ended.
    """
    files = Files()
    if target is None:
        _check_only_one(files)
    paths = local_paths(target, files)
    record = cluster_record.load_record(paths, files)
    if record is None:
        message = f"{paths.data_dir} is not the data directory of a cluster (no cluster.json)"
        raise Rejected(message, field="target")
    with directory_lock(paths, files):
        return _Stop(lambda: paths, timeout_s=timeout_s, progress=progress).run(record)


class _Stop(DirectoryCall):
    """A call of `stop`."""

    def run(self, record: ClusterRecord) -> StopReport:
        """Close the actors, end Ray if `start` started it, and remove their files in /tmp."""
        paths, files = self.paths, self.files
        self.report(f"stopping cluster {record.name!r} of {paths.data_dir}")

        recorded = ray_host.load_target(paths, files)
        running = ray_host.running_target(paths, files)
        outcomes = None if running is None else self._close_actors(running, record)
        ray_outcome = "not running" if outcomes is None else "left running"

        if recorded is not None and recorded.owned is not None:
            self.report("stopping Ray")
            ray_host.leave(recorded.owned)
            owned_ray.stop_owned(paths, files=files, clock=self.clock)
            ray_outcome = "not running" if outcomes is None else "stopped"
        elif recorded is not None:
            files.unlink(paths.ray)

        shards, replicas = range(record.shards), range(record.replicas)
        closed = [paths.replica(shard, replica) for shard in shards for replica in replicas]
        run_sweep.sweep(files, self.clock, closed)

        actors = outcomes or {}
        clean = all(outcome in ("closed", "not running") for outcome in actors.values())
        return StopReport(clean=clean, actors=actors, ray=ray_outcome)

    def _close_actors(self, running: RayTarget, record: ClusterRecord) -> dict[str, str] | None:
        """Close the actors. Returns: the outcome of each; None: that Ray runs another cluster."""

        def why_unhealthy() -> str | None:
            return (
                None
                if running.owned is None
                else owned_ray.why_unhealthy(running.owned, self.files)
            )

        try:
            fault = why_unhealthy()
            if fault is not None:
                raise Unavailable(fault, address=running.address)

            # A server of Ray may stop or end at any time before the answer.
            with ray_host.session(running, self.timeout_s, why_unhealthy=why_unhealthy) as ray:
                if actor_states.is_another(ray, record, clock=self.clock):
                    # The cluster's Ray has ended, and the Ray at this address runs another cluster.
                    other = f"another cluster named {record.name!r}"
                    self.report(f"{other} runs in Ray at {running.address}")
                    return None
                self.report(f"closing {record.shards} shard(s) of {record.name!r}")
                ended = controller_actor.close(ray, record, clock=self.clock)
                closed = actor_end.close(ray, record, clock=self.clock, timeout_s=self.timeout_s)
                return {**ended, **closed}
        except (AnotherRay, Unavailable) as error:
            # A Ray that `start` started is ended anyway. Any other Ray is the caller's to repair.
            if running.owned is None:
                raise
            return {"ray": f"does not answer: {error}"}


def _check_only_one(files: Files) -> None:
    """Raises: Rejected when several clusters are known: the one to stop must then be named."""
    known = cluster_record.known_clusters(files)
    if len(known) < 2:
        return
    each = [
        f"{name} in {data_dir}"
        + ("" if ray_host.running_target(ClusterPaths(data_dir), files) else " (does not run)")
        for name, data_dir in sorted(known.items())
    ]
    message = (
        f"several clusters are known here: {'; '.join(each)}. Nothing was stopped: name one of them"
    )
    raise Rejected(message, field="target", limit=", ".join(sorted(known)))
