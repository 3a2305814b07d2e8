"""A shard served by calls of its Ray actor.

ray_methods         put streams, reads and operations as calls
concurrency_groups  the groups of calls that do not delay each other
"""
