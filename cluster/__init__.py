"""The public side of RayMQ: start, connect, producers, consumers, administration and the command line.

start            start, connect and stop: the life cycle of a cluster
cluster          `Cluster`, the handle from which producers and consumers are made
replica_status   what every replica says of itself; moving a leader
replace_replica  gives the place of a lost replica to a new, empty one
add_queues       gives a topic more queues
add_column       gives the schema of a topic one more column
set_replicas     gives the shards of a cluster of one replica further replicas
recover_shard    goes on without a majority of the replicas of a shard, when its operator says so
add_shards       adds shards to a cluster that runs
rolling_restart  restarts every process of a cluster while its shards take messages
drain_node       lets other nodes lead what a node leads
new_topic        creates a topic on every shard
cluster_record   the options that a cluster keeps from its first start, and the clusters of this user
paths            paths and names of a cluster: data directory, run directory, actors
arguments        checks of a caller's arguments
client_thread    the threads of clients, which differ from those of the program
forks            tells objects of this process from those made before a fork
unclosed         base of clients with open connections
event_wait       waits for an asyncio event, up to a timeout
messages/        the message model
produce/         producers
consume/         consumers
queue/           `raymq.Queue` and its coordinator
ray_data/        topics as datasets of Ray Data
staged/          writes that are stored whole or not at all, from several processes
controller/      the controller of a cluster, which watches its replicas
transport/       the wire between clients and shards
deploy/          the Ray under a cluster, and its actors
cli/             the command line
spark_on_ray/    Spark 4 on Ray
bench/           `raymq bench`
"""
