"""The storage engine: one shard on one disk. No Ray, no sockets."""
