"""Consume queues: how they are built from the log, reads and filters."""
