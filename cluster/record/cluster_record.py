"""`cluster.json`, the options of a cluster since its first start, and the list of the clusters of this user.

The list (`~/.raymq/clusters/<name>.json`) maps a name to its data directory, so that `connect("orders")` works in
another shell. Without it, connect by the data directory.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar, get_args

from raymq.actors.protocol import tls
from raymq.actors.ray.actor_spec import RocketMQAccess
from raymq.actors.shared.control_block import FLUSHERS
from raymq.client.arguments import check_choice, check_number
from raymq.replication.quorum import can_fail_over
from raymq.store.base.errors import Corrupt, RayMQError, Rejected
from raymq.store.base.files import Files
from raymq.store.config.promise import FLUSHES, Flush
from raymq.store.config.store_config import StoreConfig

from .paths import ClusterPaths, check_may_read, check_name, home_dirs, run_dir
from .placement import NODE_HOST, Placement, add_replicas, check_host, place_shards
from .store_options import TAKEN, check_config

_Value = TypeVar("_Value")

#: the role of a server for RocketMQ's clients
ROCKETMQ = "rocketmq"
#: where RocketMQ's clients look for a name server
ROCKETMQ_PORT = 9876
#: of a start: from now on without such servers
NO_PORT = 0

FORMAT = 1
_SHARDS_MAX = 256
#: how many copies a shard may have. An even number above 2 would outlive no more losses than the odd one below
REPLICAS = (1, 2, 3, 5)
#: option -> how a running cluster changes it
_OPERATIONS = {
    "replicas": "leave the option out, and run `raymq shard set-replicas` when the cluster runs",
}


@dataclass(frozen=True, kw_only=True)
class ClusterRecord:
    """The properties on which all starts of a data directory agree."""

    name: str
    #: 32 hexadecimal digits
    cluster_id: str
    shards: int
    #: copies of each shard
    replicas: int
    #: a later start may change it
    flush: Flush
    segment_size_bytes: int
    ephemeral: bool
    #: 127.0.0.1 unless the operator chose otherwise; NODE_HOST: each node's own address
    host: str = "127.0.0.1"
    #: values of the node label, as given at the first start; None: all on one machine
    nodes: tuple[str, ...] | None = None
    #: the node of each replica now
    placement: Placement | None = None
    #: shard -> how often each of its replicas was replaced; None: none ever was
    generations: tuple[tuple[int, ...], ...] | None = None
    #: shard -> no process of its replicas serves an epoch below; None: 0 everywhere
    least_epochs: tuple[int, ...] | None = None
    #: what `raymq shard recover --unclean` gave up, oldest first
    unclean_recoveries: tuple[dict[str, Any], ...] = ()
    #: as given at the first start, if replicas were added since
    first_replicas: int | None = None
    first_nodes: tuple[str, ...] | None = None
    #: so many of the replicas, the last ones, get the log of the others and do not count yet (`set_replicas`)
    added_replicas: int = 0
    #: nodes that `drain_node` has emptied since the last start: the controller gives no leadership back to them
    drained_nodes: tuple[str, ...] = ()
    #: every shard has served once: a missing store is then a lost one
    formed: bool = False
    #: shards of the first start, which later starts may still name; None: none was added since
    first_shards: int | None = None
    #: while shards are added, those below have served once; None: as `formed` says of all
    formed_shards: int | None = None
    #: while shards are added, those below know every topic and take new ones; None: all do
    joined_shards: int | None = None
    #: shards serve with TLS
    tls: bool = False
    #: the operator accepted an unencrypted address that other machines reach
    insecure: bool = False
    #: leaders append through a pool in shared memory. A later start may change it
    transient_pool: bool = False
    #: hours for which a full file of messages is kept. A later start may change it
    file_reserved_hours: float = StoreConfig.file_reserved_hours
    #: hours for which a full table remembers a producer. A later start may change it
    producer_expiry_hours: float = StoreConfig.producer_expiry_hours
    #: bytes per second to a follower that catches up; 0: no limit. A later start may change it
    catch_up_bytes_per_s: int = StoreConfig.catch_up_bytes_per_s
    #: each replica has a server for RocketMQ's clients, and one of them on each node has this port for name server
    #: requests; None: there are none. A later start may change it
    rocketmq_port: int | None = None
    #: "key": these clients sign their requests; "open": they need not. A later start may change it
    rocketmq_access: RocketMQAccess = "key"
    #: further options of the stores that were given, with their values; the others have their defaults
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def has_one_replica(self) -> bool:
        """Whether each shard is a log without copies."""
        return self.replicas == 1

    @property
    def voters(self) -> tuple[int, ...]:
        """The replicas of a shard that count: a majority of them confirms a message."""
        return tuple(range(self.replicas - self.added_replicas))

    @property
    def candidates(self) -> tuple[int, ...]:
        """The replicas of a shard that may lead.

        Three replicas or more elect a leader. Of two replicas, both must have each message, so that a shard without its
        leader could not go on anyway. Replica 0 always leads there.
        """
        return self.voters if can_fail_over(len(self.voters)) else (0,)

    @property
    def joined(self) -> int:
        """How many shards are complete: clients and new topics use no others."""
        return self.shards if self.joined_shards is None else self.joined_shards

    def is_formed(self, shard: int) -> bool:
        """Whether a shard has served once, so that a missing store of it is a lost one."""
        return self.formed and (self.formed_shards is None or shard < self.formed_shards)

    def with_more_shards(self, count: int, nodes: Sequence[str] | None = None) -> ClusterRecord:
        """The record while `count` shards are being added. Args: `nodes`: where, if the cluster is over nodes.

        Raises: Rejected for too many shards, or nodes that they cannot be on.
        """
        check_number("count", count, 1)
        total = self.shards + count
        check_number("shards", total, 1, _SHARDS_MAX)

        placement = self.placement
        if placement is not None:
            # As a first start with so many shards would place them.
            placement += place_shards(nodes or self.nodes or (), total, self.replicas)[
                self.shards :
            ]
        elif nodes is not None:
            message = "all shards of this cluster are on one machine: leave the nodes out"
            raise Rejected(message, field="nodes", limit=None)

        rows = (0,) * self.replicas
        return replace(
            self,
            shards=total,
            placement=placement,
            generations=self.generations and (*self.generations, *[rows] * count),
            least_epochs=self.least_epochs and (*self.least_epochs, *[0] * count),
            first_shards=self.first_shards or self.shards,
            formed_shards=self.shards,
            joined_shards=self.shards,
        )

    def now_formed(self) -> ClusterRecord:
        """The record after every shard has served."""
        # Of a shard with one candidate on one machine no start looks for the store.
        checked = self.placement is not None or len(self.candidates) > 1
        return replace(self, formed=self.formed or checked, formed_shards=None)

    def generation_of(self, shard: int, replica: int) -> int:
        """How often a replica was replaced."""
        return 0 if self.generations is None else self.generations[shard][replica]

    def least_epoch(self, shard: int) -> int:
        """The epoch that each replica of a shard has heard at least."""
        return 0 if self.least_epochs is None else self.least_epochs[shard]

    def with_recovery(
        self, shard: int, facts: dict[str, object], least_epoch: int
    ) -> ClusterRecord:
        """The record after a shard was recovered without a majority.

        Args: `facts`: as of `recover_shard`. They take the place of an entry with the same `at_ms`.
        """
        kept = [each for each in self.unclean_recoveries if each["at_ms"] != facts["at_ms"]]
        epochs = list(self.least_epochs or (0,) * self.shards)
        epochs[shard] = max(epochs[shard], least_epoch)
        return replace(
            self,
            least_epochs=tuple(epochs),
            unclean_recoveries=(*kept, facts),
            formed=True,
        )

    def with_added_replicas(self, replicas: int, nodes: Sequence[str] | None) -> ClusterRecord:
        """The record of a cluster of one replica with further ones, which do not count yet.

        Args: `nodes`: those that have replicas then; None: the same as before.
        Raises: Rejected for nodes that cannot have them, and options that do not go with so many replicas.
        """
        record = self
        if self.placement is not None:
            names = tuple(nodes) if nodes is not None else self.nodes or ()
            placement = add_replicas(self.placement, names, replicas)
            record = replace(self, nodes=names, placement=placement)
        elif nodes is not None:
            raise Rejected(
                "this cluster was started without nodes, and stays on one machine: leave nodes out",
                field="nodes",
                limit=None,
            )

        # An empty directory of theirs is not that of a lost replica.
        generations = ((0, *(1,) * (replicas - 1)),) * self.shards
        _check_options(replace(record, replicas=replicas))
        return replace(
            record,
            replicas=replicas,
            first_replicas=self.replicas,
            first_nodes=self.nodes,
            added_replicas=replicas - 1,
            generations=generations,
            formed=True,
        )

    def with_new_replica(self, shard: int, replica: int, node: str | None) -> ClusterRecord:
        """The record after a replica was given up. Args: `node`: that of the new one; None: all on one machine."""
        none = ((0,) * self.replicas,) * self.shards
        generations = _replaced(
            self.generations or none, shard, replica, self.generation_of(shard, replica) + 1
        )
        if self.placement is None or node is None:
            return replace(self, generations=generations, formed=True)
        placement = _replaced(self.placement, shard, replica, node)
        return replace(self, generations=generations, placement=placement, formed=True)

    @property
    def doors(self) -> tuple[str, ...]:
        """The servers for foreign clients that each replica has, as roles."""
        return () if self.rocketmq_port is None else (ROCKETMQ,)

    @property
    def door_options(self) -> tuple[object, ...]:
        """What each door gets when it is made."""
        return self.rocketmq_port, self.rocketmq_access

    def roles(self, replica: int) -> tuple[str, ...]:
        """The roles of one replica in the order in which they are started, without its doors."""
        roles = ["commit_log", FLUSHERS[self.flush]]
        may_lead = replica in self.candidates
        if self.transient_pool and may_lead:
            roles.append("commit_real_time")
        if self.replicas > 1 and may_lead:
            roles.append("replication")
        return tuple(roles)


def _replaced(
    rows: tuple[tuple[_Value, ...], ...], shard: int, replica: int, value: _Value
) -> tuple[tuple[_Value, ...], ...]:
    """The table with another value for one replica."""
    row = (*rows[shard][:replica], value, *rows[shard][replica + 1 :])
    return (*rows[:shard], row, *rows[shard + 1 :])


def protection(replicas: int, nodes: Sequence[str] | None) -> str:
    """What several replicas protect from, as a line for people. Args: `nodes`: None: all are on one machine."""
    if not nodes:
        return f"{replicas} replicas on one machine: confirmed messages outlive a process or a copy, not the disk"
    lost = 1 if replicas == 2 else replicas // 2
    machines = "machine" if lost == 1 else "machines"
    names = ", ".join(nodes)
    return f"replicas on the nodes {names}: confirmed messages outlive the loss of any {lost} {machines}"


@dataclass(frozen=True, kw_only=True)
class StartOptions:
    """The options of a start, with the fields of ClusterRecord; None: unchanged, at the first start the default."""

    name: str | None = None
    shards: int | None = None
    replicas: int | None = None
    flush: Flush | None = None
    segment_size_bytes: int | None = None
    host: str | None = None
    nodes: Sequence[str] | None = None
    tls: bool | None = None
    insecure: bool = False
    transient_pool: bool | None = None
    file_reserved_hours: float | None = None
    producer_expiry_hours: float | None = None
    catch_up_bytes_per_s: int | None = None
    rocketmq_port: int | None = None
    rocketmq_access: RocketMQAccess | None = None
    #: further options of the stores, by name
    config: Mapping[str, Any] | None = None

    def given(self) -> dict[str, Any]:
        """The options that are not None, as fields of ClusterRecord. Raises: Rejected for those of `config`."""
        options = {name: value for name, value in vars(self).items() if value is not None}
        if "config" in options:
            options["config"] = check_config(options["config"])
        if options.get("rocketmq_port") == NO_PORT:
            options["rocketmq_port"] = None
        if "nodes" in options:
            options["nodes"] = tuple(options["nodes"])
        return options


def store_config(record: ClusterRecord) -> StoreConfig:
    """The options of the stores of a cluster."""
    return StoreConfig(
        segment_size_bytes=record.segment_size_bytes,
        flush=record.flush,
        transient_pool=record.transient_pool,
        file_reserved_hours=record.file_reserved_hours,
        producer_expiry_hours=record.producer_expiry_hours,
        catch_up_bytes_per_s=record.catch_up_bytes_per_s,
        **record.config,
    )


def new_record(wanted: StartOptions, *, ephemeral: bool = False) -> ClusterRecord:
    """A new cluster. Raises: Rejected naming the option."""
    options: dict[str, Any] = {
        "name": "default",
        "shards": 1,
        "replicas": 1,
        "flush": "sync",
        "segment_size_bytes": 1024**3,
        "host": "127.0.0.1" if wanted.nodes is None else NODE_HOST,
        **wanted.given(),
    }

    record = ClusterRecord(cluster_id=uuid.uuid4().hex, ephemeral=ephemeral, **options)
    check_name(record.name)
    _check_options(record)

    if record.nodes is None:
        return record
    return replace(record, placement=place_shards(record.nodes, record.shards, record.replicas))


def resume_record(stored: ClusterRecord, wanted: StartOptions) -> ClusterRecord:
    """The stored cluster with the changes of a later start.

    A later start may change flush, host, tls, insecure, transient_pool, file_reserved_hours, producer_expiry_hours,
    catch_up_bytes_per_s, the RocketMQ options, and most options of config. It ends each drain.
    Raises: Rejected when an option contradicts the record in the directory.
    """
    changes = wanted.given()
    for option in ("name", "shards", "replicas", "segment_size_bytes", "nodes"):
        kept = getattr(stored, option)
        value = changes.pop(option, kept)
        if value == getattr(stored, f"first_{option}", None):
            # Shards, or replicas on further nodes, were added since.
            continue
        if value != kept:
            raise _unchangeable(option, value, kept)

    config = changes.pop("config", {})
    for name, value in config.items():
        kept = stored.config.get(name, TAKEN[name].default)
        if TAKEN[name].changes == "first start" and value != kept:
            raise _unchangeable(name, value, kept)
    changes["config"] = {**stored.config, **config}

    changes["insecure"] |= stored.insecure
    record = replace(stored, drained_nodes=(), **changes)
    _check_options(record)
    return record


def _unchangeable(option: str, value: object, kept: object) -> Rejected:
    way = _OPERATIONS.get(option, "leave the option out, or use another data directory")
    return Rejected(
        f"{option}={value!r}, but this data directory was made with {option}={kept!r}, which a start cannot "
        f"change: {way}",
        field=option,
        limit=kept,
        found=value,
    )


def _check_options(record: ClusterRecord) -> None:
    """Raises: Rejected naming the option."""
    check_number("shards", record.shards, 1, _SHARDS_MAX)
    check_number("segment_size_bytes", record.segment_size_bytes, 4096)
    if record.replicas not in REPLICAS:
        message = (
            f"replicas={record.replicas!r}: a shard has {', '.join(map(str, REPLICAS))} replicas"
        )
        raise Rejected(message, field="replicas", limit=REPLICAS)
    if record.transient_pool and len(replace(record, added_replicas=0).candidates) > 1:
        message = (
            f"transient_pool with {record.replicas} replicas: a leader's pool is not possible together with elections; "
            "use 1 or 2 replicas, or no pool"
        )
        raise Rejected(message, field="transient_pool", limit=2)
    check_choice("flush", record.flush, FLUSHES)
    check_rocketmq(record)
    if record.nodes is not None:
        check_host(record.host)


def check_rocketmq(record: ClusterRecord) -> None:
    """Raises: Rejected for wrong options of the servers for RocketMQ's clients."""
    check_choice("rocketmq_access", record.rocketmq_access, get_args(RocketMQAccess))
    if record.rocketmq_port is not None:
        check_number("rocketmq", record.rocketmq_port, 1, tls.PORT_MAX)


def save_record(paths: ClusterPaths, record: ClusterRecord, files: Files) -> None:
    """Save the record. Durable: it survives power loss at return."""
    body: dict[str, Any] = {"format": FORMAT, **asdict(record)}
    files.write_file_atomic(paths.cluster, (json.dumps(body, indent=2) + "\n").encode())


def load_record(paths: ClusterPaths, files: Files) -> ClusterRecord | None:
    """The directory's record, None when it has none.

    Raises: Corrupt on a damaged or newer file; Rejected for a directory of another user.
    """
    if not files.exists(paths.cluster):
        check_may_read(paths.root)
        return None

    try:
        body = json.loads(files.read_file(paths.cluster))
        version = body.pop("format")
        if version != FORMAT:
            raise Corrupt(
                f"{paths.cluster} has format {version}; this version reads {FORMAT}: "
                "use the RayMQ version that wrote it, or a newer one",
                path=str(paths.cluster),
                rule="format",
                expected=FORMAT,
                found=version,
            )

        # JSON knows no tuples.
        if body.get("nodes") is not None:
            body["nodes"] = tuple(body["nodes"])
            body["placement"] = tuple(tuple(row) for row in body["placement"])
        if body.get("generations") is not None:
            body["generations"] = tuple(tuple(row) for row in body["generations"])
        if body.get("least_epochs") is not None:
            body["least_epochs"] = tuple(body["least_epochs"])
        if body.get("first_nodes") is not None:
            body["first_nodes"] = tuple(body["first_nodes"])
        body["unclean_recoveries"] = tuple(body.get("unclean_recoveries", ()))
        body["drained_nodes"] = tuple(body.get("drained_nodes", ()))
        unknown = sorted(set(body.get("config", {})) - set(TAKEN))
        if unknown:
            raise Corrupt(
                f"{paths.cluster} names options that this version does not have: {', '.join(unknown)}. Use the RayMQ "
                "version that wrote it, or a newer one",
                path=str(paths.cluster),
                rule="config",
                found=unknown,
            )
        return ClusterRecord(**body)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        message = f"{paths.cluster} is damaged ({error}); the messages are in shard-*/ and are not touched"
        raise Corrupt(message, path=str(paths.cluster), rule="cluster.json") from error


def remember(record: ClusterRecord, paths: ClusterPaths, files: Files) -> None:
    """Add the cluster to this user's list, in the first of `home_dirs` that can be written. None is not an error."""
    body = json.dumps({"data_dir": paths.data_dir, "cluster_id": record.cluster_id})
    with contextlib.suppress(OSError, RayMQError):
        run_dir(files)
    for home in home_dirs():
        with contextlib.suppress(OSError, RayMQError):
            files.make_dirs(home / "clusters", 0o700)
            files.write_file_atomic(home / "clusters" / f"{record.name}.json", body.encode())
            return


def known_clusters(files: Files) -> dict[str, str]:
    """Name -> data directory of the clusters that this user started here and whose directory exists."""
    known: dict[str, str] = {}
    for home in reversed(home_dirs()):
        folder = home / "clusters"
        names: list[str] = []
        with contextlib.suppress(OSError):
            names = [entry for entry in files.list(folder) if entry.endswith(".json")]
        for name in names:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                data_dir = json.loads(files.read_file(folder / name))["data_dir"]
                if files.exists(ClusterPaths(data_dir).cluster):
                    known[name.removesuffix(".json")] = data_dir
    return known
