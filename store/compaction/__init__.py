"""Compacted topics: the latest message of each key, beside a commit log that still has all of them.

compaction_store  the compacted queues of a store
compactor         the records that stay
sparse_log        the files of one compacted queue
synced_ends       how far the queues are synced, on disk
swap              new files for old ones, all or none
units             bytes of a unit, names of the directories
get_compacted     reads with filters, as RocketMQ's brokers make them
compacted_times   offsets by time
"""
