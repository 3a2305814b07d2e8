"""The processes beside CommitLog: GroupCommit, FlushRealTime, CommitRealTime, Replication.

satellite            the common part of a process: attach, wait for the grant, publish, exit
service              the common part of the services that satellites run
flush_service        GroupCommit and FlushRealTime as a process
commit_service       CommitRealTime as a process
replicator           Replication as a process
follower_stream      Replication's stream of log bytes to one follower
follower_connection  Replication's connection to one follower
log_reader           how Replication reads the leader's log
"""
