"""Errors keep their kind and facts on every way they travel."""

from __future__ import annotations

import json
import pickle

import pytest

from raymq.store.base import errors
from raymq.store.base.errors import (
    DeliveryUnknown,
    NotLeading,
    OffsetOutOfRange,
    RayMQError,
    Unavailable,
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


CASES = [each for each in KINDS if each.__base__ not in (Exception, RayMQError)]


@pytest.mark.parametrize("case", CASES)
def test_a_case_that_the_receiver_does_not_know_becomes_the_error_of_its_kind(
    case: type[RayMQError],
) -> None:
    kind = case.__base__
    assert kind is not None
    assert kind.__base__ is RayMQError
    wire = to_wire(case("why", epoch=2))
    assert (wire["kind"], wire["case"]) == (kind.__name__, case.__name__)
    # A peer of an older version reads no case, or one that it has no class for.
    older = {name: value for name, value in wire.items() if name != "case"}
    for received in (older, {**wire, "case": "Future"}):
        found = from_wire(json.loads(json.dumps(received)))
        assert type(found) is kind
        assert (found.message, found.fields) == ("why", {"epoch": 2})


def test_a_case_of_another_kind_is_ignored() -> None:
    found = from_wire({"kind": "Unavailable", "case": "SequenceGap", "message": "x"})
    assert type(found) is Unavailable


def test_a_kind_is_no_case() -> None:
    assert "case" not in to_wire(Unavailable("x"))
    found = from_wire({"kind": "Unavailable", "case": "Rejected", "message": "x"})
    assert type(found) is Unavailable


def test_a_subclass_that_does_not_travel_arrives_as_the_error_of_its_kind() -> None:
    class Local(Unavailable):
        """Of one module."""

    assert to_wire(Local("x")) == to_wire(Unavailable("x"))
    assert type(pickle.loads(pickle.dumps(Local("x")))) is Unavailable


def test_a_subclass_of_a_case_arrives_as_the_case() -> None:
    # As Ray makes them of errors that it raises again.
    again = type("RayTaskError(NotLeading)", (NotLeading,), {})
    found = from_wire(to_wire(again("x", endpoint="a")))
    assert (type(found), found.endpoint) == (NotLeading, "a")


def test_a_kind_from_a_newer_version_becomes_the_root_error() -> None:
    found = from_wire({"kind": "Future", "message": "new", "fields": {"a": 1}})
    assert type(found) is RayMQError
    assert found.a == 1


def test_a_fact_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError):
        _ = OffsetOutOfRange("x", min=1).max


def test_only_errors_that_may_pass_by_themselves_are_retriable() -> None:
    assert {kind.__name__ for kind in KINDS if kind.retriable and kind not in CASES} == {
        "Unavailable",
        "CommitUnknown",
        "DeliveryUnknown",
        "StorageFull",
    }
    assert DeliveryUnknown("x").retriable
    assert all(case.retriable is case.__base__.retriable for case in CASES)  # type: ignore[union-attr]


def test_require_raises_a_bug_with_the_values() -> None:
    errors.require(True, "fine")
    with pytest.raises(errors.Bug, match="offset=3") as bug:
        errors.require(False, "impossible", offset=3)
    assert bug.value.offset == 3
