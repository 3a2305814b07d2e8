"""`raymq bench`: load from many workers, and proof that every message came back as it was sent.

run              a whole benchmark, from topics to the highest rate
dataset_load     the load tests through Spark and Ray Data
spark_engine     that of Spark
ray_data_engine  that of Ray Data
plan             options, and the distributions of sizes and keys
worker_pool      the workers, as plain processes or as Ray tasks
callers          the load of one process, with rows that were made before
worker           one worker: it sends, reads or verifies
job              the workers' jobs, clock and figures
send             how a worker sends
read             how a worker reads
messages         the messages, made and read back as columns
check            compares receipts with the log
histogram        latencies with three significant digits
series           the figures of all workers, merged
machine          host, disk and versions
progress         a live table, or one line per second
report           the result as data for JSON, and as lines
page             the result as an HTML page
"""
