"""The protocol's page names every operation."""

from __future__ import annotations

import inspect
import re

from raymq.actors import protocol
from raymq.actors.leader.admin_calls import AdminCalls
from raymq.actors.supervise.replica_host import ReplicaHost


def test_the_page_of_the_protocol_names_every_operation_with_its_arguments():
    page = dict(re.findall(r"^    (\w+)\(([\w, ]*)\) {2,}", protocol.__doc__ or "", re.MULTILINE))
    operations = {
        name.removeprefix("_op_"): ", ".join(list(inspect.signature(method).parameters)[1:])
        for name, method in {**vars(ReplicaHost), **vars(AdminCalls)}.items()
        if name.startswith("_op_")
    }
    assert page == operations
