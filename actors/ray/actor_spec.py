"""What the constructor of each actor gets: plain values, because Ray gives them to each restart of the actor, too."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from raymq.store.config.promise import Flush

#: "key": RocketMQ's clients sign their requests. "open": they need not
RocketMQAccess = Literal["key", "open"]


class ActorSpec(TypedDict):
    """One actor of a replica. Most fields are those of the cluster's record and of `CommitLog.identity`."""

    #: the cluster's name and id, and where its record is
    cluster: str
    cluster_id: str
    cluster_dir: str
    #: RayMQ's version that made the actor
    version: str
    #: of the shard's clients: the token, and the certificate authority as PEM; None: without TLS
    token: str
    ca: str | None
    tls: bool
    insecure: bool
    #: the address on which the replica listens
    host: str
    #: copies of each shard, and those that may lead and that vote
    replicas: int
    candidates: tuple[int, ...]
    voters: tuple[int, ...]
    flush: Flush
    ephemeral: bool
    #: by shard and replica: the label of the node; None: all are on one machine
    placement: tuple[tuple[str, ...], ...] | None
    #: options of `StoreConfig` that differ from its defaults
    options: dict[str, Any]
    #: "module:name" of what runs before the store is opened
    prepare: str

    shard: int
    #: so many shards exist for this one
    shards: int
    #: the shard had its first leader
    formed: bool
    #: the shard is being added
    joining: bool
    replica: int
    #: "commit_log", or that of a satellite
    role: str
    #: the roles of the replica's other actors
    satellites: tuple[str, ...]
    data_dir: str
    #: replica -> its data directory and the name of its CommitLog, of the others of the shard
    peers: dict[int, list[str]]
    #: the port of a node for name server requests of RocketMQ's clients, whose servers are actors, too; None: none are
    rocketmq_port: int | None
    rocketmq_access: RocketMQAccess
    #: the label of the node on which the actor stays; None: this machine
    node: str | None
    #: how often this replica was replaced, and by replica for all of the shard
    generation: int
    generations: tuple[int, ...]
    #: no leader of the shard has a lower epoch
    least_epoch: int


class Credentials(TypedDict):
    """What a program inside of Ray needs to be a client of the cluster."""

    cluster_id: str
    shards: int
    replicas: int
    token: str
    ca: str | None
    placement: tuple[tuple[str, ...], ...] | None
    delay_levels: int


class ReadyFacts(TypedDict):
    """What a CommitLog always says of itself while a cluster is started or changed."""

    #: STARTING, RUNNING or READ_ONLY; in place of an answer PENDING or DOWN
    state: str
    #: None: the replica listens nowhere yet
    endpoint: str | None
    error: str | None
    #: "leader" or "follower"; None: neither yet
    mode: str | None
    epoch: int
    #: the roles of satellites of which none works yet
    missing_roles: list[str]


class ReadyRow(ReadyFacts, total=False):
    """The answer of a CommitLog's `ready`."""

    pid: int
    #: while it starts: its store is damaged, and it may begin again because the others have what that store lacks
    is_damaged: bool
    may_begin_again: bool
    #: while it serves
    is_complete: bool
    confirmed: int
