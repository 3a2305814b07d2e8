"""Replication decisions as pure state machines: events in, effects out. No Ray, files or clock."""
