"""Leases: several workers share the messages of a queue, and settle each message alone.

options         what a group of workers may set
requests        what a worker asks, and the answers
request_checks  what of that the log can say
offsets         offsets of a queue as ranges or as a bitmap
reader          reads packed records
pauses          why a group gets nothing
entries         what the records LEASE and SETTLE say
packing         these records as bytes
queue_columns   one queue: how each offset between the low mark and the next one stands
group_leases    the queues, leases and sessions of a group, as a function of the log
lease_table     all groups of a shard; a part of its state
lease_times     deadlines and delays, which no record has
key_order       which messages may go out when those of one key have an order
lease_machine   the decisions: lease, settle, extend, expire
"""
