"""The engine in one process, for programs that embed it.

embedded_store  a store with its flush and dispatch on threads
put_message     single messages with any fields, answered by a PutStatus
async_put       single messages that need not wait for each other
"""
