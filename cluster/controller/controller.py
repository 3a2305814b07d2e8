"""The controller: looks at all replicas again and again, and helps where no replica can help itself.

It has no authority (rule R19 of docs/design.md). All that it does is a call that an operator or a client makes, too.
Each is refused or harmless if it comes late, twice, or from a controller that is cut off. A round of it:

    look      ask every CommitLog through Ray; a metric for what is seen (cluster_watch.py)
    publish   tell all replicas where the others listen, if that has changed
    make      make actors again that Ray has forgotten, as a start does
    suggest   ask a leader to hand over to the replica that led before it was lost

Everything that changes the cluster's actors is done under the lock of its data directory, like the commands of an
operator. While one of these has the lock, or after `stop`, nothing is done.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from types import ModuleType
from typing import Any

from raymq.actors.leader.metrics import Collector, MakeInstrument, MetricValues
from raymq.actors.protocol import tls
from raymq.actors.ray.actor_spec import ReadyRow
from raymq.client.transport.actor_names import NAMESPACE, actor_name
from raymq.cluster.deploy import actor_set, actor_states, node_labels, ray_host
from raymq.cluster.deploy.resolve import save_endpoints
from raymq.cluster.record import cluster_record
from raymq.cluster.record.cluster_record import ClusterRecord
from raymq.cluster.record.paths import ClusterPaths, directory_lock, load_token
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Unavailable
from raymq.store.base.files import Files

from .cluster_watch import ClusterWatch, Move, ReplicaFacts
from .controller_metrics import CONTROLLER_METRICS

logger = logging.getLogger("raymq.controller")

#: between two rounds at least
PAUSE_S = 2.0
#: ... and this for each replica, so that a large cluster costs no more CPU than a small one
PAUSE_OF_REPLICA_S = 0.1
#: how long the replicas may take to answer
LOOK_TIMEOUT_S = 2.0
#: how long one may take to answer anything else
CALL_TIMEOUT_S = 3.0
#: after forgotten actors were made again, until others are: they may end again at once
MAKE_PAUSE_S = 10.0

#: what is published: (shard, replica) -> endpoint and pid, shard -> leader
_Routes = tuple[dict[tuple[int, int], tuple[str, int | None]], dict[int, int]]


class Controller:
    """The rounds. Callers: one thread; `status` by any."""

    def __init__(
        self,
        ray: ModuleType,
        cluster_dir: str,
        *,
        make_instrument: MakeInstrument,
        clock: Clock | None = None,
        files: Files | None = None,
    ) -> None:
        """Args: `ray`: the initialised module. `cluster_dir`: the data directory with `cluster.json`."""
        self._ray = ray
        self._paths = ClusterPaths(cluster_dir)
        self._make_instrument = make_instrument
        self._clock = clock or Clock()
        self._files = files or Files()
        self._watch = ClusterWatch()
        self._collector: Collector | None = None
        #: name -> handle of a CommitLog
        self._handles: dict[str, Any] = {}
        #: name -> a call that it has not answered: one that hangs gets no second one
        self._unanswered: dict[str, Any] = {}
        self._published: _Routes | None = None
        self._made_s: float | None = None
        self._restarts = 0
        self._moves = 0
        self._rounds = 0
        #: step -> its error in the last round
        self._errors: dict[str, str] = {}

    def run(self, stopped: threading.Event) -> None:
        """Make rounds until `stopped`."""
        pause_s = 0.0
        while not stopped.wait(pause_s):
            replicas = self.round()
            pause_s = max(PAUSE_S, PAUSE_OF_REPLICA_S * replicas)

    def round(self) -> int:
        """Make one round. An error of a step is logged once, and ends only that step. Returns: replicas seen."""
        rows: list[ReplicaFacts] = []
        with self._step("look"):
            record = self._load_record()
            names = actor_states.actor_names(self._ray)
            states = self._look(record, names)
            rows = [_facts(key, state) for key, state in states.items()]
            self._watch.observe(self._clock.monotonic(), rows)
            self._collect(record)

        if "look" not in self._errors:
            with self._step("publish"):
                self._publish(record, states)
            with self._step("make"):
                self._make(record, names)
            with self._step("suggest"):
                self._suggest(record)
        self._rounds += 1
        return len(rows)

    def status(self) -> dict[str, Any]:
        """For tests and displays."""
        return {
            "pid": os.getpid(),
            "rounds": self._rounds,
            "errors": dict(self._errors),
            "leaders": self._watch.leaders(),
            "metrics": {
                name: value if isinstance(value, int) else {key[0]: value[key] for key in value}
                for name, value in {**self._watch.metrics(), **self._own_metrics()}.items()
            },
        }

    @contextlib.contextmanager
    def _step(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            # Any error: the next round may do better, and the metrics of the others must not end.
            text = f"{type(error).__name__}: {error}"
            if self._errors.get(name) != text:
                logger.warning("%s: %s", name, text)
            self._errors[name] = text
        else:
            self._errors.pop(name, None)

    def _load_record(self) -> ClusterRecord:
        """The options of the cluster now. Raises: Unavailable, Corrupt."""
        record = cluster_record.load_record(self._paths, self._files)
        if record is None:
            raise Unavailable(f"{self._paths.data_dir} has no cluster.json", field="target")
        return record

    @contextlib.contextmanager
    def _locked(self) -> Iterator[ClusterRecord | None]:
        """The record, which no command changes meanwhile; None while a command runs, and after `stop`."""
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(directory_lock(self._paths, self._files, wait_ms=0))
            except Unavailable:
                yield None
                return
            yield self._load_record() if self._is_started() else None

    def _is_started(self) -> bool:
        """Whether the cluster runs in this Ray, as its data directory says."""
        target = ray_host.load_target(self._paths, self._files)
        mine = self._ray.get_runtime_context().gcs_address
        # The host of an address may be written in several ways.
        return target is not None and _port(target.address) == _port(mine)

    # --- look -------------------------------------------------------------------------------------

    def _look(self, record: ClusterRecord, names: list[str]) -> dict[tuple[int, int], ReadyRow]:
        """(shard, replica) -> the answer of `ready`."""
        ray, known = self._ray, set(names)
        present = node_labels.present(ray) if record.placement else {}
        calls: dict[tuple[int, int], Any] = {}
        states: dict[tuple[int, int], ReadyRow] = {}
        for shard in range(record.shards):
            for replica in range(record.replicas):
                name = actor_name(record.name, shard, replica, "commit_log")
                node = actor_states.node_of(record, shard, replica)
                if node is not None and node not in present:
                    # Ray would hold a call until the node is back.
                    states[shard, replica] = actor_states.absent("PENDING", f"node {node} is away")
                    continue
                call = self._ask(name) if name in known else None
                if call is None:
                    states[shard, replica] = actor_states.absent("MISSING", "Ray does not know it")
                    self._forget(name)
                else:
                    calls[shard, replica] = call

        deadline_s = self._clock.monotonic() + LOOK_TIMEOUT_S
        for key, call in calls.items():
            left_s = max(0.0, deadline_s - self._clock.monotonic())
            state = states[key] = actor_states.answer(ray, call, left_s)
            name = actor_name(record.name, *key, "commit_log")
            self._unanswered.pop(name, None)
            if state["state"] == "PENDING":
                self._unanswered[name] = call
            elif state["state"] == "DOWN":
                # Another actor may have the name by now.
                self._forget(name)
        return states

    def _ask(self, name: str) -> Any:
        """A call of `ready`, or the last one if it is unanswered; None: Ray does not know the actor."""
        if name in self._unanswered:
            return self._unanswered[name]
        if name not in self._handles:
            try:
                self._handles[name] = self._ray.get_actor(name, namespace=NAMESPACE)
            except ValueError:
                return None
        return self._handles[name].ready.remote()

    def _forget(self, name: str) -> None:
        self._handles.pop(name, None)
        self._unanswered.pop(name, None)

    def _collect(self, record: ClusterRecord) -> None:
        if self._collector is None:
            self._collector = Collector(
                self._metrics,
                self._make_instrument,
                tags={"cluster": record.name},
                metrics=CONTROLLER_METRICS,
            )
        self._collector.collect()

    def _metrics(self) -> MetricValues:
        return {**self._watch.metrics(), **self._own_metrics()}

    def _own_metrics(self) -> dict[str, int]:
        return {
            "raymq_controller_restarts_total": self._restarts,
            "raymq_controller_moves_total": self._moves,
        }

    # --- publish ----------------------------------------------------------------------------------

    def _publish(self, record: ClusterRecord, states: dict[tuple[int, int], ReadyRow]) -> None:
        """Send all replicas the addresses of the others, if these have changed."""
        # A new process at the old address has missed what was published meanwhile.
        endpoints = {
            key: (str(each["endpoint"]), each.get("pid"))
            for key, each in states.items()
            if each["endpoint"]
        }
        known, led = self._published or ({}, {})
        routes = ({**known, **endpoints}, {**led, **self._watch.leaders()})
        if routes == self._published or not endpoints:
            return

        # Those that do not answer now keep what the others know of them.
        known_rows: dict[str, Any] = self._call(record, next(iter(endpoints)), "replicas", {})
        leaders: dict[str, str] = self._call(record, next(iter(endpoints)), "routes", {})
        found = actor_set.publish_endpoints(
            self._ray,
            record,
            {int(shard): str(at) for shard, at in leaders.items()},
            {
                int(shard): {int(replica): str(at) for replica, at in row.items()}
                for shard, row in known_rows.items()
            },
            self._clock,
        )
        if record.placement is not None:
            save_endpoints(self._paths, found, self._files)
        self._published = routes

    def _call(
        self, record: ClusterRecord, key: tuple[int, int], op: str, args: Mapping[str, object]
    ) -> dict[str, Any]:
        """An operation of a replica. Raises: its error, or Ray's."""
        handle = self._handles[actor_name(record.name, *key, "commit_log")]
        call = handle.call.remote(record.cluster_id, op, args)
        answer: dict[str, Any] = self._ray.get(call, timeout=CALL_TIMEOUT_S)
        return answer

    # --- make -------------------------------------------------------------------------------------

    def _make(self, record: ClusterRecord, names: list[str]) -> None:
        """Make actors again that Ray has forgotten. One of the same name that is there meanwhile is kept."""
        now_s = self._clock.monotonic()
        if not actor_states.missing(record, names) or (
            self._made_s is not None and now_s - self._made_s < MAKE_PAUSE_S
        ):
            return

        with self._locked() as current:
            if current is None:
                return
            lost = actor_states.missing(current, actor_states.actor_names(self._ray))
            if not lost:
                return
            self._made_s = now_s
            paths, files = self._paths, self._files
            members, _ = actor_set.converge(
                self._ray,
                current,
                paths,
                load_token(paths, files),
                tls.read_ca(paths.ca, files) if files.exists(paths.ca) else None,
                wanted=lambda *key: key in lost,
                timeout_s=CALL_TIMEOUT_S,
            )
            self._restarts += len(members)
            for member in members:
                logger.warning("%s: Ray had forgotten it; it starts again", member.name)

    # --- suggest ----------------------------------------------------------------------------------

    def _suggest(self, record: ClusterRecord) -> None:
        """Ask a leader to hand over to the replica at home, if there is one to be asked now."""
        if record.placement is None:
            # On one machine it makes no difference which replica leads.
            return
        move = self._watch.suggest(partial(_may_lead, record))
        if move is None:
            return
        with self._locked() as current:
            # The node may have been drained since the record was read.
            if current is not None and _may_lead(current, move.shard, move.replica):
                self.ask_to_hand_over(current, move)

    def ask_to_hand_over(self, record: ClusterRecord, move: Move) -> None:
        """The call of an operator's `move-leader`. Raises: the leader's refusal."""
        logger.warning(
            "shard %d: replica %d is asked to hand over to replica %d, which led before it was lost",
            move.shard,
            move.leader,
            move.replica,
        )
        self._moves += 1
        self._call(record, (move.shard, move.leader), "move_leader", {"replica": move.replica})


def _facts(key: tuple[int, int], state: ReadyRow) -> ReplicaFacts:
    return ReplicaFacts(
        *key,
        state=state["state"],
        leads=state["mode"] == "leader",
        epoch=state["epoch"],
        is_complete=bool(state.get("is_complete")),
        confirmed=state.get("confirmed", 0),
        pid=state.get("pid"),
    )


def _may_lead(record: ClusterRecord, shard: int, replica: int) -> bool:
    """Whether the node of a replica is not drained."""
    return actor_states.node_of(record, shard, replica) not in record.drained_nodes


def _port(address: str) -> str:
    return address.rpartition(":")[2]
