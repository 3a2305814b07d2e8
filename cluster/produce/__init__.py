"""The way of messages to the shards: collected, numbered, sent, resent, answered."""
