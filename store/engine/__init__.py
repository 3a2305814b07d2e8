"""One shard's store, made of all layers below.

message_store   RocketMQ's DefaultMessageStore, in columns
store_recovery  from the files on disk to a store that serves
"""
