"""The index: messages by key, unique key, id and time."""
