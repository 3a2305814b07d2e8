"""The Ray actor classes, and the calls that come through Ray.

actor_classes       the Ray actors, thin wrappers
concurrency_groups  the groups of calls that do not delay each other
ray_methods         serves a shard to clients that reach only Ray
"""
