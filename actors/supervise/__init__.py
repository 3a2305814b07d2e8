"""The CommitLog process of any replica: its host, and how it supervises its satellites (leases, progress, fencing).

supervisor    grants leases to satellites, combines their progress, fences the dead
lease         the lease of one role, as CommitLog sees it
elections     the election machine of the replica, with its ballot on disk
ballot        the replica's ballot on disk, for its other processes
election_peers  carries messages of elections to the other replicas
callable_peers  finds out which other replicas can be called
log_copier    copies what the log lacks from a replica that cannot lead
log_repair    mends damaged bytes of the log with those of other replicas
role          what the process does while it leads, or while it follows
dispatcher    dispatches confirmed messages, and holds reads that wait
replica_host  the process: start, roles, ack loop, failure, stop
"""
