"""The CommitLog process of a shard's leader."""
