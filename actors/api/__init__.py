"""What a shard offers to the servers in front of it: its operations, checks of their arguments, their wire forms."""
