"""Shared by all commands: input, output, exit codes and the connection to a cluster."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

from raymq.store.base import errors
from raymq.store.base.errors import RayMQError, Rejected
from raymq.store.base.files import Files

EXIT_OK = 0
EXIT_FAULT = 1
EXIT_USAGE = 2
EXIT_UNAVAILABLE = 3


def exit_code(error: RayMQError) -> int:
    """The exit code of an error that ended a command."""
    if isinstance(error, (Rejected, errors.OffsetOutOfRange)):
        return EXIT_USAGE
    return EXIT_UNAVAILABLE if error.retriable else EXIT_FAULT


def _open_closed() -> None:
    """Open /dev/null as each standard stream that the caller has closed: Python has None in its place."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # It stays open as long as the process.
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115


class Console:
    """Standard input and output, and the module that reaches clusters. Tests replace each of them."""

    def __init__(
        self,
        *,
        stdin: IO[bytes] | None = None,
        stdout: IO[bytes] | None = None,
        stderr: IO[str] | None = None,
        lifecycle: Any = None,
    ) -> None:
        _open_closed()
        self.stdin = stdin or sys.stdin.buffer
        self.stdout = stdout or sys.stdout.buffer
        self.stderr = stderr or sys.stderr
        self._lifecycle = lifecycle

    @property
    def lifecycle(self) -> Any:
        """`start`, `connect` and `stop`, loaded when first needed."""
        if self._lifecycle is None:
            from raymq.cluster.connect import connect
            from raymq.cluster.start import start
            from raymq.cluster.stop import stop

            self._lifecycle = SimpleNamespace(start=start, connect=connect, stop=stop)
        return self._lifecycle

    def line(self, text: str | bytes) -> None:
        """One line of result."""
        self.stdout.write((text.encode() if isinstance(text, str) else text) + b"\n")

    def json(self, value: object) -> None:
        """One JSON value of result, on one line."""
        self.line(json.dumps(value, default=str))

    def result(self, options: argparse.Namespace, value: object, *lines: str) -> None:
        """The result of a command: `value` with --json, else `lines`."""
        if options.json:
            self.json(value)
            return
        for line in lines:
            self.line(line)

    def note(self, text: str) -> None:
        """Progress: never part of the result."""
        print(text, file=self.stderr, flush=True)

    def ask(self, question: str) -> None:
        """A question, which the next line of standard input answers."""
        print(question, end="", file=self.stderr, flush=True)

    def error(self, error: RayMQError, *, as_json: bool) -> None:
        """An error that ends the command."""
        text = json.dumps(errors.to_wire(error), default=str) if as_json else f"raymq: {error}"
        print(text, file=self.stderr, flush=True)

    def flush(self) -> None:
        """Write out the buffered text."""
        self.stdout.flush()


def cluster_of(options: argparse.Namespace, console: Console) -> Any:
    """The cluster that `--cluster` and `--token-file` name. Raises: the errors of `raymq.connect`."""
    return connect(options.cluster, options.token_file, console)


#: the options and the cluster of a command, and what a method of the cluster returned -> the result: JSON, and lines
Show = Callable[[argparse.Namespace, Any, Any], tuple[Any, list[str]]]


@dataclass(frozen=True)
class ClusterOperation:
    """A command that calls one method of the cluster, and shows the result."""

    method: str
    #: names of the options that are its arguments, and of those that are its keywords
    arguments: str
    keywords: str
    show: Show
    #: whether it reports its progress
    long: bool = False

    def __call__(self, options: argparse.Namespace, console: Console) -> int:
        given: dict[str, Any] = {name: getattr(options, name) for name in self.keywords.split()}
        if self.long:
            given["progress"] = console.note
        with cluster_of(options, console) as cluster:
            arguments = (getattr(options, name) for name in self.arguments.split())
            found = getattr(cluster, self.method)(*arguments, **given)
            facts, lines = self.show(options, cluster, found)
        console.result(options, facts, *lines)
        return EXIT_OK


def connect(target: str | None, token_file: str | None, console: Console) -> Any:
    """A handle on the cluster. Raises: the errors of `raymq.connect`; Rejected for a token file."""
    token = None
    if token_file is not None:
        try:
            token = Files().read_file(Path(token_file).expanduser()).decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise Rejected(f"--token-file {token_file}: {error}", field="token_file") from error
    return console.lifecycle.connect(target, token=token)
