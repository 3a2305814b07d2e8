"""Errors keep their kind and facts on every way they travel."""

from __future__ import annotations

import json
import pickle

import pytest

from raymq.store.base import errors
from raymq.store.base.errors import (
    DeliveryUnknown,
    OffsetOutOfRange,
    RayMQError,
    from_wire,
    to_wire,
)

KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, RayMQError)
]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_pickles_with_its_kind_message_and_fields(kind: type[RayMQError]) -> None:
    found = pickle.loads(pickle.dumps(kind("why", field="body", limit=3, row=7)))
    assert type(found) is kind
    assert str(found) == "why"
    assert (found.field, found.limit, found.row) == ("body", 3, 7)
    assert found.retriable is kind.retriable


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_crosses_the_wire_with_its_kind_message_and_fields(kind: type[RayMQError]) -> None:
    found = from_wire(json.loads(json.dumps(to_wire(kind("why", min=1, max=2)))))
    assert type(found) is kind
    assert (found.message, found.fields) == ("why", {"min": 1, "max": 2})


def test_a_kind_from_a_newer_version_becomes_the_root_error() -> None:
    found = from_wire({"kind": "Future", "message": "new", "fields": {"a": 1}})
    assert type(found) is RayMQError
    assert found.a == 1


def test_a_fact_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError):
        _ = OffsetOutOfRange("x", min=1).max


def test_only_errors_that_may_pass_by_themselves_are_retriable() -> None:
    assert {kind.__name__ for kind in KINDS if kind.retriable} == {
        "Unavailable",
        "DeliveryUnknown",
        "StorageFull",
    }
    assert DeliveryUnknown("x").retriable


def test_require_raises_a_bug_with_the_values() -> None:
    errors.require(True, "fine")
    with pytest.raises(errors.Bug, match="offset=3") as bug:
        errors.require(False, "impossible", offset=3)
    assert bug.value.offset == 3
