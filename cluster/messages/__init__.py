"""The message model: its columns, keys and codecs, and the choice of a queue."""
