"""From a put to the log.

put_path         the puts of users: check, encode, lock, number, write
inner_put        the puts of the store's own services
service_host     what the store's services need of the store
service_records  appends records of the store itself as one unit
snapshot_writer  a snapshot of the state at the start of each segment
put_lock         the lock that orders appends
put_hooks        hooks before and after a put
put_errors       RocketMQ's statuses and RayMQ's errors
small_unit       gathers small batches into one append unit
stats            counters and rates of a store
duplicates       finds the stored row that a producer sends again
inner_message    messages of the store's own services, whole bundles or none
topic_records    creates and changes topics
option_records   changes options while the store is open
"""
