"""The elections of one replica as its ack loop runs them, and as other replicas and clients ask for them."""

from __future__ import annotations

import contextlib
from typing import Any

from raymq.actors.api.status_rows import LeaderRow
from raymq.actors.shared.control_block import Leadership
from raymq.replication.election_events import FollowerHeard, HandOver
from raymq.replication.wire import ReplicaProcess
from raymq.store.base.errors import Bug, Corrupt, Rejected
from raymq.store.base.running_flags import FENCED
from raymq.store.engine.message_store import MessageStore
from raymq.store.state.shard_state import UNCLEAN_RECOVERIES

from .addresses import ClusterAddresses
from .elections import Elections
from .replica_options import ReplicaOptions
from .serving import Serving
from .supervisor import Supervisor


def make_elections(store: MessageStore, options: ReplicaOptions) -> Elections:
    """The elections of a recovered store, which takes no puts yet."""
    store.flags.set(FENCED)
    me = ReplicaProcess(options.replica_id, int(options.identity.get("incarnation", 0)))
    return Elections(
        store.log,
        me,
        members=options.all_members,
        candidates=options.candidates,
        clock=options.clock,
        put_lock=store.put_lock,
        flags=store.flags,
        cluster_id=str(options.identity["cluster_id"]),
        shard=options.shard,
        limits=options.limits,
        is_new_complete=options.is_new_complete,
        generations=options.generations,
        least_epoch=options.least_epoch,
        # Where replica 0 is decides where shards are led first: leaders are spread so.
        is_preferred=options.replica_id == 0,
    )


class ElectionLoop:
    """What one replica does for its elections. Callers: the ack loop calls `run`, any thread the rest."""

    def __init__(
        self,
        elections: Elections,
        store: MessageStore,
        supervisor: Supervisor,
        serving: Serving,
        addresses: ClusterAddresses,
        options: ReplicaOptions,
    ) -> None:
        self._elections = elections
        self._store = store
        self._supervisor = supervisor
        self._serving = serving
        self._addresses = addresses
        self._options = options
        #: replica -> when it acknowledged last, as the elections know
        self._followers_heard: dict[int, int] = {}

    # --- the ack loop -----------------------------------------------------------------------------

    def run(self, led: Leadership | None) -> None:
        """Do what is due. Callers: the ack loop. Args: `led`: the epoch that this replica leads."""
        if self._options.sole_candidate is None:
            self._elections.tick()
            self._report_followers(led)

    def _report_followers(self, led: Leadership | None) -> None:
        """Give the elections what Replication knows of the followers."""
        if led is None:
            return
        for replica in self._options.others:
            found = self._supervisor.control.followers[replica].read()
            is_new = found.heard_ms > self._followers_heard.get(replica, 0)
            if found.epoch == led.epoch and is_new:
                self._followers_heard[replica] = found.heard_ms
                self._elections.step(
                    FollowerHeard(replica, led.epoch, found.durable_end, found.is_complete)
                )

    def idle_wait_ms(self, limit_ms: int) -> int:
        """How long the ack loop may sleep while its role has nothing to do. Args: `limit_ms`: what the role allows."""
        if self._options.sole_candidate is not None or self._serving.stop_error is not None:
            return limit_ms
        return min(limit_ms, self._elections.wait_ms())

    def leave(self) -> None:
        """Let the other replicas elect another leader at once: this one writes nothing more."""
        if self._options.sole_candidate is None:
            with contextlib.suppress(OSError):
                self._elections.leave()

    # --- other replicas and clients ---------------------------------------------------------------

    def elect(self, frame: bytes) -> list[bytes]:
        """Take a message of another replica's elections. Returns: the messages that answer it.

        A replica of which a sync has failed still answers, by what it had synced before: others need its vote.
        Raises: Rejected for a frame of another shard; Unavailable when nothing is answered any more.
        """
        serving = self._serving
        votes_on = self._store.log.health.sync_failed
        if isinstance(serving.stop_error, (Corrupt, Bug)):
            votes_on = False
        if serving.is_stopping() or not votes_on:
            serving.check()
        return self._elections.receive(frame)

    def take_answer(self, frame: bytes) -> None:
        """Take a message that answers one of this replica."""
        if self._serving.stop_error is None and not self._serving.is_stopping():
            self._elections.take(frame)

    def hand_over(self, replica: int) -> None:
        """Let another replica lead, once its log has all of this one. Callers: while this replica leads.

        Raises: Rejected for one that may not lead.
        """
        own = self._options.replica_id
        others = [each for each in self._options.candidates if each != own]
        if type(replica) is not int or replica not in others:
            raise Rejected(
                f"replica {replica!r} cannot lead this shard in place of replica {own}; "
                f"those that can: {others or 'none'}",
                field="replica",
                limit=others,
                found=replica,
            )
        self._elections.step(HandOver(replica))

    def leader_hint(self) -> LeaderRow:
        """Who leads the shard, as far as this replica knows."""
        replica = self.leader_id
        return {
            "replica": replica,
            "epoch": self._elections.epoch,
            "endpoint": self._addresses.find(replica),
            "unclean_recoveries": len(self.unclean_recoveries()),
        }

    @property
    def leader_id(self) -> int | None:
        """The replica that leads the shard, as far as this one knows."""
        leader = self._elections.leader
        return None if leader is None else leader.id

    def unclean_recoveries(self) -> list[dict[str, Any]]:
        """When a majority of the replicas was lost, by an operator's decision or with its disks, oldest first."""
        return list(self._store.state.progress.get(UNCLEAN_RECOVERIES, {}).values())
