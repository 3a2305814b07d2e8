"""The concurrency groups of a CommitLog actor: neither long polls nor operations delay puts."""

from __future__ import annotations

#: group -> its threads. A put holds one until it is answered, a read while it waits.
GROUPS = {"append": 16, "read": 64, "admin": 4}
#: method -> its group. A stream opens where its puts go: operations may wait for a disk or a follower.
GROUP_OF = {
    "open_stream": "append",
    "append": "append",
    "read": "read",
    "lease": "read",
    "call": "admin",
}
