"""What is known of a cluster on this machine without Ray: its options, its directory, where its replicas are to be.

cluster_record  the options that a cluster keeps from its first start, and the clusters of this user
disk_room       whether the disks have room for a first start
paths           paths of a cluster: data directory, run directory
placement       which node gets which replica
rocketmq_options  the options of RocketMQ's store that RayMQ does not have
store_options   the options of the stores that `start` takes as `config`
targets         the clusters that a user names
"""
