"""The wire between clients and shards: Arrow Flight with TLS, or Ray's actor calls; and which shard is where."""
