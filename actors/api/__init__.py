"""The interface between a shard and the servers in front of it, and the checks of what clients send."""
