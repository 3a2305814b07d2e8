"""The way of messages back: from an offset, in order, read ahead."""
