"""Consume queues: built from the log, read and filtered.

consume_queue     one queue: 20 bytes per message
queue_files       the files of one queue
consume_queues    all queues of a store
unit_places       the places that units give to records whose own place is damaged
reput_service     dispatch: from the log into the queues and the index
reader            reads as consumers make them: from an offset, confirmed records only, all or what a filter wants
expression_filter  the filter that a subscription names
get_message       reads as RocketMQ's brokers make them: statuses, limits, filters
message_filter    filters by tag
sql_filter        filters by properties
sql_syntax        the syntax of these filters: a tree whose parts know their positions
raw_records       a fetched slice, and its records as columns
"""
