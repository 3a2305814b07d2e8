"""Compaction topics: the latest message of each key, beside a commit log that still has all of them."""
