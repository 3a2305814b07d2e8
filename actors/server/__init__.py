"""What answers clients in a shard's own process: one folder for each wire protocol, over `ShardBackend` alone.

A server of a foreign protocol is a process of its own, and a client of the shards.

flight/  Arrow Flight, which clients and other replicas use
ray/     calls of the shard's Ray actor, for clients that reach only Ray's port
"""
