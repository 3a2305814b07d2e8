"""How the CommitLog process supervises its satellites: leases, progress, fencing."""
