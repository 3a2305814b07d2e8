"""Shared by the processes of one replica: control block, rings, wakeups, heartbeats. No pyarrow, no numpy."""
