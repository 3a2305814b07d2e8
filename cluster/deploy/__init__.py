"""A cluster on Ray: the Ray under it, its actors, the nodes they are on, where they listen now.

ray_host         the Ray under a cluster: which one it is, and the way into it
ray_release      what differs between the releases of Ray
owned_ray        the Ray that `start` owns
ray_head         the program that becomes a detached `ray start`
ray_probe        the program that tries whether a Ray takes a driver
start_checks     what a start or an operation checks of a record
ray_client       clusters reached through ray://
actor_set        the actors of one cluster: created, waited for
actor_states     those that run, and what their CommitLogs say
door_set         servers for foreign clients: what they need, and whether they serve
rocketmq_door    the actor of a server for RocketMQ's clients
actor_end        the order in which they are closed and ended
node_labels      the nodes of a Ray by their labels
prepare_replica  what a replica does on its node before it opens its store
replaced_store   the directory of a replica that takes the place of another one
resolve          finds the present endpoints of shards
process_tree     finds and ends all processes of one program
run_sweep        removes the files of dead processes
"""
