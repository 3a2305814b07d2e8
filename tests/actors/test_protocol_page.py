"""The protocol's page names every operation."""

from __future__ import annotations

import inspect
import re

from raymq.actors import protocol
from raymq.actors.replica import OPERATIONS


def test_the_page_of_the_protocol_names_every_operation_with_its_arguments():
    page = dict(re.findall(r"^    (\w+)\(([\w, ]*)\) {2,}", protocol.__doc__ or "", re.MULTILINE))
    operations = {name: ", ".join(each.arguments) for name, each in OPERATIONS.items()}
    assert page == operations


def test_the_function_of_an_operation_takes_what_its_table_checks():
    for name, each in OPERATIONS.items():
        _, *parameters = inspect.signature(each.run).parameters.values()
        assert [parameter.name for parameter in parameters] == list(each.arguments), name
        assert [parameter.default is not parameter.empty for parameter in parameters] == [
            argument.is_optional for argument in each.arguments.values()
        ], name
