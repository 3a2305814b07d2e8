"""What every layer uses: errors, clock, files, byte formats. These modules import nothing else of RayMQ.

errors         every error that RayMQ raises
clock          the only module that reads clocks
failpoints     named points at which tests stop or fail a durable step
status         the answers of a put, in RocketMQ's names
rules          rules that errors and faults name, if several modules check them
arrays         names of array types
files          the only module that touches files, with file_maps
file_maps      maps of files, and reads through them
format         byte formats of the commit log and the consume queues
checksum       CRC-32C and CRC-32
slow_calls     calls of more than half a second: counted, and logged now and then
running_flags  bits that stop reads, puts or dispatch of a running store
"""
