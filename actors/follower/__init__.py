"""The CommitLog process of a shard's follower.

host      the CommitLog role: stores the leader's units, and acknowledges them
follower  the follower's side of replication in that process
"""
