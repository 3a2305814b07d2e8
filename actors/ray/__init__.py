"""The Ray actor classes, and the calls that come through Ray."""
