"""The CommitLog process of any replica: its host, and how it supervises its satellites (leases, progress, fencing)."""
