"""Ray Data: topics as sources and sinks of datasets. Programs import `raymq.data`.

topic_source   reads topics as a dataset
topic_sink     writes a dataset to a topic, each row once
sink_columns   the columns of such a dataset
micro_batches  a topic as a loop over datasets
lease_batches  the same for loops that share the messages
"""
