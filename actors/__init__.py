"""The processes of a shard, which host store/ and replication/, and the shared state that joins them.

shared/      what the processes of one replica share: control block, rings, wakeups, heartbeats
protocol/    every message between clients and shards
api/         the interface between a shard and its servers
supervise/   the CommitLog process of any replica: its host, elections, satellites
leader/      what the CommitLog process does while it leads
follower/    what the CommitLog process does while it follows
satellites/  the processes beside CommitLog: GroupCommit, FlushRealTime, CommitRealTime, Replication
replica      one replica in this process, with the classes of both roles
server/      what answers clients, for each wire protocol
ray/         the Ray actor classes around all of these
"""
