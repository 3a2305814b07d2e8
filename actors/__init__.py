"""Processes that host store/ and replication/, and the shared state that joins them (design D4)."""
