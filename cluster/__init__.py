"""What a user touches: start, connect, producers, consumers, admin and the command line."""
