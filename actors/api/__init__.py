"""The interface between a shard and the servers in front of it, and the checks of what clients send.

shard_api        `ShardBackend`, and `PutTicket` for a put under way
puts             puts and their acks, whatever carries them
fetches          a fetch and its answer, whatever carries them
operations       the table of a shard's operations: their arguments and functions
status_rows      what the status of a replica consists of
held_fetch       a fetch that is held until a message comes
call_arguments   checks of arguments that came over the network
group_arguments  checks of what members of consumer groups send
leases           leases of messages, and settlements, whatever carries them
transactions     transactions of one shard, whatever carries them
"""
