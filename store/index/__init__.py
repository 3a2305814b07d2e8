"""The index: messages by key, unique key, id and time.

index_keys     the hashes of keys
index_file     one file of RocketMQ's hash index
index_service  all index files of a store
index_builder  indexes confirmed records
key_search     the newest messages of one key
query_keys     the messages of many keys together
query          all kinds of queries
"""
