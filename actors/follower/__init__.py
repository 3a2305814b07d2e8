"""The CommitLog process of a replica while it follows.

follower    the role: has the leader's bytes synced, sends clients to the leader
reads       the reads that a follower serves
heard_ends  the confirmed ends that the leader named, and when
session     the streams of a leader, and the frames that answer them
log_port    the log as these streams change it
"""
