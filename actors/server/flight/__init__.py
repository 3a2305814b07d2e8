"""The Flight server of a replica.

flight_server   the server: its streams and its operations
put_stream      the server's side of a put stream
receive_memory  the limit of received batches without an answer
call_flood      keeps the interpreter usable while thousands of calls begin at once
"""
