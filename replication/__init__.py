"""Replication decisions as pure state machines: events in, effects out. No Ray, files or clock.

log_sender    sends the leader's log to one follower
match         finds where two logs stop being equal
log_receiver  receives the leader's log
election      elections, fencing and confirmation of one replica
log_copy      copies a log from a replica that cannot lead, before an election
delays        the slowest delay of a message that was measured lately
quorum        how many replicas must agree
wire          the messages between both sides
incarnation   the number of a process, with the generation of its replica
combiner      combines the flush future and the replica future of each put
"""
