"""The message model: its columns, keys and codecs, and the choice of a queue.

fields           the table of a message's fields: types, places, columns, JSON, limits
message          messages to send, and receipts
record_head      flag, sysFlag, born host, delay level and WAIT of a message
received         received messages, decoded when a field is first read
compressed_body  bodies that clients of RocketMQ have compressed
columns          from columns to batches, and from raw records to columns
keys             keys in the properties of a record
codecs           values as bodies: bytes, json, msgpack, arrow-ipc
partitioner      the queue of a key
write_columns    the columns that Spark and Ray Data write, and rows by topic and queue
queue_split      rows of one topic, by queue
row_numbers      the numbers of rows in errors, as a user counts them
delivery_times   delivery times of many rows as properties
topic_schema     the schema of a topic: its types and its JSON
column_text      a column of a schema as text, for the command line
topic_values     values of a topic: bytes or rows of its schema, or null
json_rows        rows as JSON objects, by columns
property_rows    properties of many rows, encoded from columns of pairs
user_properties  properties of many messages as columns
"""
