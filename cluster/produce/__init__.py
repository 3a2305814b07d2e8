"""Producers: messages are batched, numbered, sent, resent and acknowledged."""
