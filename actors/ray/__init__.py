"""The Ray actor classes, and the calls that come through Ray.

actor_classes       the Ray actors, thin wrappers
process_setup       settings of an actor's process
damaged_store       moves a damaged store aside, so that its replica begins again
peer_calls          calls of another replica whose address may be out of date
replica_files       where a replica listens, and why its last process gave up
concurrency_groups  the groups of calls that do not delay each other
ray_methods         serves a shard to clients that reach only Ray
"""
