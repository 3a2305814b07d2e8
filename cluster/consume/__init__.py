"""Consumers: read messages from an offset, in order, and read ahead."""
