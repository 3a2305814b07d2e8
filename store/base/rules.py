"""The rules by which errors and faults name what does not hold, if several modules check them."""

from __future__ import annotations

READABLE_RULE = "stored bytes can be read"
FILE_NAME_RULE = "file name"
FILE_LENGTH_RULE = "file length"
FILE_OF_OFFSET_RULE = "offset has a file"
CRC_RULE = "bytes equal their chain unit"
COVERAGE_RULE = "the chain covers the log"
UNIT_RECORD_RULE = "a unit points at its record"
MISSING_RULE = "each queue offset has a message"
COMPACTION_PAIR_RULE = "a compaction log file has its file of units"
