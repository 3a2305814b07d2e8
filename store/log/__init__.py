"""The log of one replica on disk: files, chain, marks, flush and recovery. Records are opaque bytes with boundaries."""
