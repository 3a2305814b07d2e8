"""The command line `raymq`: its parser, which `grammar.py` describes, and its exit codes.

Exit codes:

    0    done
    1    a fault was found: damage, a failed check, a shard that does not serve
    2    the command is wrong
    3    the cluster is not available now
    130  interrupted
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from raymq import __version__
from raymq.store.base.errors import RayMQError, Unavailable

from .console import EXIT_USAGE, Console, exit_code
from .grammar import commands_of_grammar

_EPILOG = "exit codes: 0 done, 1 a fault was found, 2 wrong command, 3 cluster not available"
#: where the part of a docstring begins that is for programs
_FOR_PROGRAMS = re.compile(r"\n\n(?:Example|Args|Returns|Durable|Raises):")


class _Parser(argparse.ArgumentParser):
    """argparse, with every option spelled out and a hint for a misspelled one."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{**kwargs, "allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: {message}\nTry `{self.prog} --help`.\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        # Checked here and not by the outermost parser: the hint must know this command's options.
        found, extra = super().parse_known_args(args, namespace)
        if extra:
            self.error(_unknown(extra[0], list(self._option_string_actions)))
        return found, extra


def _unknown(word: str, known: list[str]) -> str:
    if not word.startswith("-"):
        return f"unexpected argument {word!r}"
    option = word.partition("=")[0]
    near = difflib.get_close_matches(option, known, n=1)
    return f"unknown option {option}" + (f"; did you mean {near[0]}?" if near else "")


def build_parser(*, docstrings: bool = True) -> argparse.ArgumentParser:
    """The whole grammar. Args: `docstrings`: load the operations, whose docstrings are the help of their commands."""
    parser = _Parser(
        prog="raymq", description="A durable, replicated message log on Ray.", epilog=_EPILOG
    )
    parser.add_argument("--version", action="version", version=f"raymq {__version__}")
    groups = {"": parser.add_subparsers(dest="command", required=True, metavar="COMMAND")}

    for command in commands_of_grammar():
        group, _, name = command.words.rpartition(" ")
        text, described = command.text, None
        if text.startswith("= "):
            text, described = _promise(text.removeprefix("= ")) if docstrings else ("", None)
        added = groups[group].add_parser(
            name, help=text, description=described, epilog=command.epilog
        )
        if command.run is None:
            dest = "mode" if name == "bench" else "verb"
            groups[name] = added.add_subparsers(dest=dest, required=True, metavar=dest.upper())
            continue
        added.set_defaults(run=command.run)
        for names, options in command.options:
            added.add_argument(*names, **options)

    return parser


def _promise(method: str) -> tuple[str, str]:
    """The first sentence of a docstring of `Cluster`, as a help, and all that is not for programs alone."""
    from raymq.cluster.cluster import Cluster

    text = _FOR_PROGRAMS.split(inspect.getdoc(getattr(Cluster, method)) or "")[0]
    text = " ".join(text.split())
    sentence = text.partition(". ")[0].removesuffix(".")
    return sentence[:1].lower() + sentence[1:], text


def main(argv: Sequence[str] | None = None, *, console: Console | None = None) -> int:
    """Run one command. Returns: its exit code. An error of RayMQ becomes one line."""
    console = console or Console()
    try:
        words = sys.argv[1:] if argv is None else argv
        options = build_parser(docstrings=not {"-h", "--help"}.isdisjoint(words)).parse_args(words)
    except SystemExit as leaving:
        # argparse has printed the help or the error.
        return int(leaving.code or 0) if not isinstance(leaving.code, str) else EXIT_USAGE

    try:
        code: int = options.run(options, console)
        console.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader (head, less) has seen enough. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except RayMQError as error:
        failure = error
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        failure = Unavailable(f"{where}{error.strerror or error}", errno=error.errno)

    console.error(failure, as_json=getattr(options, "json", False))
    return exit_code(failure)


if __name__ == "__main__":
    sys.exit(main())
