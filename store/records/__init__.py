"""Records: from columns to bytes and back. Import `record`, which has the names of the modules under it.

record          the front of record_check, record_encode, record_walk, record_decode and small_batch
requests        puts and fetches with their records, and the shard's answers
record_check    the check of a batch before any of its rows is stored
record_encode   columns to bytes
small_batch     the same two for up to 64 short rows, without arrays
record_walk     record boundaries in log bytes
record_decode   bytes to columns
one_record      a single record, without arrays
rows            stored records as runs of consecutive rows
properties      the properties string
dead_letter     what a dead letter says, in its properties, of the message that it was
property_columns  the properties of many records as columns
producer_stamp  the property with producer id, epoch and sequence
keys            KEYS and UNIQ_KEY
staged_range    rows of a staged write, as a client and a shard name them
key_check       refuses rows without KEYS for compacted topics
binary_columns  offsets and bytes of Arrow's binary columns
"""
