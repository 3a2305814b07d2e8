"""Connections from clients to shards, by Arrow Flight or by calls of Ray actors, and the shards' endpoints.

connection        a connection to a shard, by either transport
flight_client     a connection by Arrow Flight
ray_connection    a connection by calls of the shard's Ray actor
kept_connections  connections that stay open between calls
actor_names       the names of a cluster's actors in Ray
fetch_thread      fetches from one shard, over a stream that is opened again when it breaks
ask               asks several shards at the same time
away              repeats a call while a shard is away
routes            addresses of shards
leader_route      where a shard's leader is
topic_routes      the topics, and the shards of their queues
nearest           reads from the nearest replica of a shard
chained_future    futures of answers, whose blocked callers are woken one after the other
locality          whether an endpoint is on this machine
"""
