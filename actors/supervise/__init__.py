"""What the CommitLog process knows of its satellites: leases, progress, fencing."""
