"""The CommitLog process of any replica: its host, and how it supervises its satellites (leases, progress, fencing).

supervisor          grants leases to satellites, combines their progress, fences the dead
lease               the lease of one role, as CommitLog sees it
elections           the election machine of the replica, with its ballot on disk
ballot              the replica's ballot on disk, for its other processes
election_loop       what the replica does for its elections, and answers about the leader
peers               the other replicas, as elections reach them
election_peers      carries messages of elections to the other replicas
callable_peers      finds out which other replicas can be called
addresses           where shards and replicas listen, as far as the replica knows
doors               where servers for foreign clients listen, as far as the replica knows
log_copier          copies what the log lacks from a replica that cannot lead
log_repair          mends damaged bytes of the log with those of other replicas
log_guard           orders changes of a followed log, and pauses the satellites for them
led_epoch           the epoch that the replica leads: its begin and its end
serving             whether the replica still writes, and why not
role                what the process does while it leads, or while it follows
roles               the present role, and the change to the next one
dispatcher          dispatches confirmed messages, and holds reads that wait
service_threads     the service loops, each in a thread
replica_identity    what the replica says of itself to those that connect
replica_status      status, causes and metrics
replica_operations  the operations that any replica answers
replica_options     what one replica is, and what its process gives it
replica_parts       what roles work with
replica_host        the process: start, service loops, stop
"""
