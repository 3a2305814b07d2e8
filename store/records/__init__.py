"""The bytes of records: columns to records and back, their walk, the check before. `records/record.py` is the front."""
