"""The CommitLog process of a replica while it leads.

leader          the role: takes puts, answers clients
appender        appends the puts of many threads in groups
put_acks        answers puts when their promise is kept, or as unknown
delays          delivers delayed messages
transactions    half messages: those that are open, and those that are given up
group_service   runs the consumer groups that this shard coordinates
dead_letters    lists dead letters, reads them, puts them back
worker_leases   leases messages to workers, and settles them
transaction_commits  commits transactions that lie on this shard
lease_options   which options the workers of each group have
queue_claims    claims on the queues of this shard, and offsets of groups
lock_times      when clients of RocketMQ have renewed their locks of queues
group_records   what their records have in common
group_progress  how far groups are on this shard
disk_losses     writes down that a majority of the replicas had lost its disks
operations      the administrative operations, by subject
leader_report   its part of the status, its failures, and the values of its metrics
metrics         the exported metrics, and the thread that exports them
leader_metrics  values of metrics that take more than one counter
"""
