"""Shared by the processes of one replica: control block, rings, wakeups, heartbeats. No pyarrow, no numpy.

control_block   the page of fields through which processes report their ends
memory_order    the order in which they see each other's stores, on each architecture
ring            the lists between CommitLog and Replication
wakeup          how one process wakes another
append_wakeups  the rules by which most wakeups are left out
idle_cores      whether the machine's cores have time to spare
time_slice      short time slices for threads that answer others
heartbeat       how a CommitLog that hangs is noticed
processes       processes as (pid, start time), held by pidfd
failures        operations that fail and are tried again
retry_throttle  tries an optimisation less often while it does not help
latency         latencies as a few counts
maintenance     statistics, upkeep and deletion of old files
"""
