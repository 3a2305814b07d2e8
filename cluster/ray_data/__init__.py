"""Ray Data: topics as sinks of datasets. Programs import `raymq.data`.

topic_sink  writes a dataset to a topic, each row once
"""
