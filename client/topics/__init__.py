"""Topics on every shard of a cluster.

new_topic     creates a topic on every shard
delete_topic  deletes it there
add_queues    gives a topic more queues
retry_topics  topics of messages that a group could not handle
add_column    gives the schema of a topic one more column
"""
