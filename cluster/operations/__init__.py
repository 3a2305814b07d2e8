"""The operations of an operator on a cluster that runs, each as a function over `ClusterHandle`.

context          `DirectoryCall` of `start` and `stop`: record, deadline and progress of one call. `OperationCall` of
                 operations, too: lock, Ray, replicas made and awaited
replace_replica  gives the place of a lost replica to a new, empty one
set_replicas     gives the shards of a cluster of one replica further replicas
recover_shard    goes on without a majority of the replicas of a shard, when its operator says so
add_shards       adds shards to a cluster that runs
rolling_restart  restarts every process of a cluster while its shards take messages
doors            gives a cluster that runs servers for foreign clients, and takes them away
set_config       changes options of the stores of a cluster that runs, and shows them
drain_node       lets other nodes lead what a node leads
"""
