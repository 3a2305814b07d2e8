"""The wire between clients and shards, by Arrow Flight with TLS or by Ray's actor calls, and the shards' endpoints.

connection      a connection to a shard, by either transport
flight_client   the client's side of Arrow Flight
flight_server   the Flight server of a replica
call_flood      keeps the interpreter usable while thousands of calls begin at once
grpc_polling    lets the thread that waits for a message read the socket itself
put_stream      the server's side of a put stream
receive_memory  the limit of received batches without an answer
ray_connection  a connection by calls of the shard's Ray actor
fetch_thread    fetches from one shard, over a stream that is opened again when it breaks
ask             asks several shards at the same time
away            repeats a call while a shard is away
routes          addresses of shards, and topics
nearest         reads from the nearest replica of a shard
locality        whether an endpoint is on this machine
tls             certificates of the shards' connections
"""
