"""`raymq.Queue`: the calls of `ray.util.queue.Queue` on a durable topic, and the coordinator that assigns its items.

durable_queue      `Queue`, the handle that a program has
queue_client       a process's producer and reader of one queue
taken_items        reads and decodes the items that a get was assigned
coordinator        the actor that assigns items to gets, and room to puts
coordinator_calls  calls of that actor, repeated after its death
assignment_log     the queue's two topics: items, and assignments
local_socket       the Unix socket to a coordinator on the same host
"""
