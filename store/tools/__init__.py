"""Tools that check, repair and export a store that is not open. Nothing here serves messages.

inspect         `verify` and `dump`; faults are the results of `verify`
read_only       a store opened for reading only; slices of its records
verify_chain    one module for each kind of file: also verify_compaction, verify_files, verify_index, verify_queues
repair          plans and makes a repair; repair_backup copies the files first
rebuild         derived files from the log; rebuild_index those of the index
export          messages as Parquet files
dump            messages as dicts
scrub_store     a scrub from the command line
"""
