"""The processes beside CommitLog: GroupCommit, FlushRealTime, CommitRealTime, Replication."""
