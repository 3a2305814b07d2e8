"""Staged writes: tasks stage rows that no reader sees, and one commit publishes all of them exactly once.

staged_writer  stages the rows of one task attempt
write_commit   the rules of a commit: decide, then publish; a pure state machine
committer      performs a commit on the shards
"""
