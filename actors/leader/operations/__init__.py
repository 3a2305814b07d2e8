"""The operations of a leader, by subject. Each module has a table: name -> arguments and function.

table      all of them
scope      what they work on
topics     topics and their queues
offsets    offsets of consumer groups, and messages that a group sends back
retries    messages that clients put into the retry topics of their groups
groups     heartbeats of members of consumer groups, and claims of queues
dead_letters  dead letters of groups: how many, what they say, the way back
leases     settlements of leased messages, and more time
queries    messages by time, key and id
timers     timers that are cancelled
message_arguments  arguments of those that put one message
commits    transactions that lie on this shard
transactions  half messages: prepared, ended, checked
producers  producers and their epochs
writes     staged writes: the decision, and the publication of rows
shard      the shard itself: who leads, what was lost, other shards, old files
"""
