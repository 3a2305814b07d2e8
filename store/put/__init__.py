"""The way of messages into the log: doors, checks, the put lock, groups that stand or fall together."""
