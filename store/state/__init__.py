"""The state of a shard, as a function of its log: topics, offsets, producers.

shard_state       applies the records of the log; writes and reads snapshots
producer_table    sequences and offsets of a million producers
features          the level of features that the log has used
snapshot_columns  numbers of a snapshot, packed as columns
topic_schema      the schema in the attributes of a topic, and which change of it is allowed
topics            names of topics, and the checks of a new one
unconfirmed       what readers see in place of a topic or an offset that is not confirmed yet
"""
