"""`raymq bench`: load from many workers, and proof that every message came back as it was sent."""
