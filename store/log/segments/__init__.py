"""The files with the bytes of a commit log, and those of other logs of a store.

mapped_file        one file: written by pwrite, read through a map
mapped_file_queue  a directory of equal files; it makes the next one in advance
log_files          the commit log's directories as one mapped file queue
segment_paths      the names of the files, on one disk or several
spare_files        deleted files that are used again
read_ahead         pages in memory before the log's end reaches them
read_together      many small ranges with few reads
"""
