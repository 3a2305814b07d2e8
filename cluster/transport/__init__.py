"""The wire between clients and shards, by Arrow Flight with TLS or by Ray's actor calls, and the shards' endpoints."""
