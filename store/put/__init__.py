"""Puts: checks, hooks, the append under the put lock, groups of messages that are stored together or not at all."""
