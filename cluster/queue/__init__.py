"""`raymq.Queue`: the calls of `ray.util.queue.Queue` on a durable topic, and the keeper who hands its items out."""
