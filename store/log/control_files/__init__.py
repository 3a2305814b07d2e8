"""The control files of a log: its ends, its identity, and whether a process has it open.

marks       the ends of the log and of its consume queues, in a mapped page
meta        identity, epoch and modes of the replica
checkpoint  RocketMQ's file of synced store times
abort_lock  RocketMQ's files `abort` and `lock`
"""
