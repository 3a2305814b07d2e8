"""What the processes of one replica share: control block, rings, wakeups, heartbeats. Neither pyarrow nor numpy."""
