"""Tools that check, repair and export a store that is not open. Nothing here serves messages.

inspect            `verify` and `dump`
faults             the results of `verify`
read_only          a store opened for reading only
slices             walked records in slices of bounded memory
verify_queues      consume queues against the log
verify_index       index files against the log
verify_chain       the chain's own files
verify_compaction  compacted queues
verify_files       the small files: checkpoint, marks, config, timers
repair             plans and makes a repair
repair_backup      copies the files before a repair changes them
rebuild            derived files from the log
rebuild_index      index files from the log
export             messages as Parquet files
dump               messages as dicts
scrub_store        a scrub from the command line
"""
