"""The log of one replica on disk. It takes records as opaque bytes; only recovery walks their boundaries.

commit_log        appends and cuts the log
log_parts         opens what the log's directory holds
log_health        whether the log takes appends: failed appends, failed syncs
log_reads         what everything outside the log reads of it, and the damage met
record_reads      records at given offsets, checked
chain             a CRC for each append unit, linked to the unit before
chain_maker       units for bytes that have none
unit_bounds       where a unit that is made again ends
epochs            where epochs begin, read again from the log's records
flush             GroupCommit and FlushRealTime: when to sync
transient_pool    shared memory for appends
log_pool          the log's use of the pool
commit_real_time  CommitRealTime: when to write pool bytes into the files
clean             deletion of old files
believed_clock    the wall clock by which they are deleted
scrub             compares old bytes with their CRCs
segments/         the files with the log's bytes
control_files/    the files that say how far the log is and whose it is
recovery/         finds the end of the log at a start
mending/          repairs damaged bytes with those of another replica
"""
