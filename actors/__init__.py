"""The processes of a shard, which host store/ and replication/, and the shared state that joins them.

shared     what the processes of one replica share: control block, rings, wakeups, heartbeats
supervise  how CommitLog's process supervises its satellites
api        the interface between a shard and its servers
protocol   every message between clients and shards
leader     the CommitLog process of a leader
follower   the CommitLog process of a follower
satellites the processes beside CommitLog: GroupCommit, FlushRealTime, CommitRealTime, Replication
ray        the Ray actor classes around all of these
"""
