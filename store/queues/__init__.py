"""What readers see: consume queues, how they are built, reads and filters."""
