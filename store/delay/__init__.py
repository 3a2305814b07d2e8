"""Delay levels and timers: messages that are delivered later."""
