"""Replication decisions as pure state machines: events in, effects out. No Ray, files or clock.

log_sender        sends the leader's log to one follower
match             finds where two logs stop being equal
log_receiver      receives the leader's log
election          elections, fencing and confirmation of one replica: the candidate and the leader
voter             what every replica does in elections: its ballot, votes, the leader that it follows
leader_health     when a leader should let another replica lead
leader_knowledge  what a leader knows of its epoch and its followers
patience          how long a replica waits for the others
election_events   what the election machine takes and returns
election_limits   the times of elections
log_copy          copies a log from a replica that cannot lead, before an election
delays            the slowest delay of a message that was measured lately
quorum            how many replicas must agree
wire              the messages between both sides
incarnation       the number of a process, with the generation of its replica
combiner          combines the flush future and the replica future of each put
"""
