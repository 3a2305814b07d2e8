"""The public side of RayMQ: start, connect, producers, consumers, administration and the command line."""
