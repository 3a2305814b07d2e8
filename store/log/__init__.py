"""The log of one replica on disk: files, chain, marks, flush and recovery. It knows records only by their walk."""
