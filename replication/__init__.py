"""Replication decisions as pure state machines: events in, effects out. No Ray, files or clock.

mirror           the leader's side of a mirror
match            finds where two logs stop being equal
mirror_follower  the follower's side
election         elections, fencing and confirmation of one replica
quorum           how many replicas must agree
wire             the messages between both sides
combiner         combines the flush future and the replica future of each put
"""
