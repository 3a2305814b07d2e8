"""Consumers: read messages from an offset, in order, and read ahead.

consumer         `Consumer`, which blocks
async_consumer   `AsyncConsumer`, for asyncio
consumer_config  options, defaults and checks of both
wanted_topics    the topics that a consumer reads: names, or a pattern
start_offsets    where it begins to read a queue
member_queues    the queues of a consumer that shares a topic with its group: they come and go
transaction_offsets  offsets of a member that a transaction commits
membership       its membership in the group: heartbeats, claims, what its program has to do
group_member     the same as a state machine without I/O
heartbeats       sends the heartbeats of all members of a process
selector         the options `tags` and `sql` of all readers
assigned_queues  the queues that a consumer reads, and how far
shard_reader     reads ahead from one shard
range_reader     reads one queue by offset, for Spark tasks, queues and checks
queue_ranges     ranges of queues, which tasks of Spark and Ray Data read
offsets_by_time  asks the shards at which offsets a time is
queries          single messages, and messages by key or time
time_search      finds the first message that was stored at a time or later
verify_crcs      compares fetched records with their CRCs
"""
