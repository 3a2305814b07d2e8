"""One shard's store, made of all layers below.

message_store   RocketMQ's DefaultMessageStore, in columns
followed_log    the store's writing side while another replica leads
store_recovery  from the files on disk to a store that serves
retention       what of the log may be deleted, and what goes with it
state_applier   applies records of the log to the state
"""
