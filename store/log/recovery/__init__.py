"""The recovery of a log after a stop or a crash.

log_recovery    makes files, chain and marks agree with the end that was found
log_scan        walks the records to the end of the log
recovery_table  decides whether the scan stopped at the end, in a torn tail or at damage
snapshot_head   finds the snapshot at the beginning of a segment
"""
