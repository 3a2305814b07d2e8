"""From a put to the log.

put_path       the append: check, encode, lock, number, write
put_lock       the lock that orders appends
put_hooks      hooks before and after a put
put_errors     RocketMQ's statuses and RayMQ's errors
small_unit     gathers small batches into one append unit
duplicates     finds the stored row that a producer sends again
inner_message  messages of the store's own services, whole groups or none
"""
