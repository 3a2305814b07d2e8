"""The repair of a log's damaged bytes with the sound bytes of another replica.

fitting       whether bytes of another replica are those that this one has lost
chain_window  the chain units around a place, read from the chain's files
sound_bytes   what a replica gives to another one: bytes that it has compared with its own chain
log_mender    finds damaged units, and puts sound bytes in their place
mended_copy   the new file of a segment with damaged bytes
"""
