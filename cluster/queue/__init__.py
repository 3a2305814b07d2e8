"""`raymq.Queue`: the calls of `ray.util.queue.Queue` on a durable topic, and the coordinator that assigns its items."""
