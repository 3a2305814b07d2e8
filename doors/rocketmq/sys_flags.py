"""The bits of a message's sysFlag. Source: MessageSysFlag."""

from __future__ import annotations

from raymq.store.base import format as fmt

#: the value of these bits is one of no transaction, PREPARED, COMMITTED and ROLLBACK
TRANSACTION_MASK = fmt.SYS_TRANSACTION_MASK
#: readers unpack the body into messages; the broker stores it as one record
INNER_BATCH = 0x80
