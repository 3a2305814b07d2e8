"""The Ray actor classes: a replica, its servers and its satellites in Ray's processes.

actor_spec         what the constructor of each actor gets
actor_classes      the Ray actors, thin wrappers
process_setup      settings of an actor's process
damaged_store      moves a damaged store aside, so that its replica begins again
peer_calls         calls of another replica whose address may be out of date
replica_files      where a replica listens, and why its last process gave up
replica_transport  how the replicas of a shard reach each other
"""
