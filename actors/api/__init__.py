"""The interface between a shard and the servers in front of it, and the checks of what clients send.

shard_api       `ShardBackend`, and `PutTicket` for a put under way
fetches         a fetch and its answer, whatever carries them
call_arguments  checks of arguments that came over the network
"""
