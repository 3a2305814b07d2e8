"""The error of a task, found in what Spark says of it."""

from __future__ import annotations

from raymq.spark.task_errors import error_in
from raymq.store.base.errors import NotLeading, Rejected, Unavailable

TEXT = """
An exception was thrown from the Python worker. Please see the stack trace below.
Traceback (most recent call last):
  File "sink.py", line 9, in work
    raise Unavailable("shard 0 does not answer")
raymq.store.base.errors.Unavailable: shard 0 does not answer

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "sink.py", line 11, in work
raymq.store.base.errors.Rejected: row 3: value is null, which topic t does not allow

\tat org.apache.spark.api.python.BasePythonRunner$ReaderIterator.handlePythonException(PythonRunner.scala:572)
"""


def test_the_last_error_of_raymq_in_a_text_is_found() -> None:
    found = error_in(TEXT)
    assert type(found) is Rejected
    assert str(found) == "row 3: value is null, which topic t does not allow"
    assert not found.retriable
    before = error_in(TEXT.partition("During")[0])
    assert type(before) is Unavailable
    assert before.retriable


def test_other_errors_of_spark_are_left_as_they_are() -> None:
    assert error_in("ZeroDivisionError: division by zero") is None
    assert error_in("raymq.store.base.errors.require: not an error") is None


def test_an_error_by_which_raymq_steers_is_found_too() -> None:
    found = error_in("raymq.store.base.errors.NotLeading: this replica does not lead")
    assert type(found) is NotLeading
