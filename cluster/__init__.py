"""What needs Ray: start, connect, administration, the command line.

start            creates a cluster, or resumes one
connect          finds a running cluster
cluster          `Cluster`, from which producers and consumers are made
stop             ends a cluster
locked_call      what `start` and `stop` have in common
targets          the clusters that a user names
replica_status   what every replica says of itself; moving a leader
replace_replica  gives the place of a lost replica to a new, empty one
set_replicas     gives the shards of a cluster of one replica further replicas
recover_shard    goes on without a majority of the replicas of a shard, when its operator says so
add_shards       adds shards to a cluster that runs
rolling_restart  restarts every process of a cluster while its shards take messages
drain_node       lets other nodes lead what a node leads
cluster_record   the options that a cluster keeps from its first start, and the clusters of this user
paths            paths of a cluster: data directory, run directory
queue/           `raymq.Queue` and its coordinator
ray_data/        topics as datasets of Ray Data
controller/      the controller of a cluster, which watches its replicas
deploy/          the Ray under a cluster, and its actors
cli/             the command line
spark_on_ray/    Spark 4 on Ray
bench/           `raymq bench`
"""
