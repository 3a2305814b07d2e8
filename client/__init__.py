"""The client of a cluster: messages, producers, consumers, staged writes, topics. No Ray, but for one module.

handle          `ClusterHandle`: where the shards are, the token, and their calls
arguments       checks of a caller's arguments
times           points in time as callers give them
client_thread   the threads of clients, which differ from those of the program
event_wait      waits for an asyncio event, up to a timeout
forks           tells objects of this process from those made before a fork
hooks           the hooks of producers and consumers, and their failures
tracing         a hook that puts OpenTelemetry's context into messages
unclosed        base of clients with open connections
group_facts     what an operator sees of consumer groups
group_admin     what an operator does with them: offsets, pause, end
dead_letters    messages that groups could not handle, and the way back
replica_status  what every replica of a shard says of itself; moving a leader
messages/       the message model
transport/      connections to shards, and the shards' endpoints
topics/         topics on every shard: created, with more queues, with one more column
produce/        producers
consume/        consumers
workers/        workers: they lease messages, and settle each alone
staged/         writes that are stored whole or not at all, from several processes
"""
