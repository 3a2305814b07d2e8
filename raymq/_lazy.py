"""Loads the names of a package on first use (PEP 562)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package.

    Args: `homes`: name -> module, or "module:attribute" where the attribute has another name; "module:" is the
    module itself.
    """

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home, colon, attribute = homes[name].partition(":")
        module = importlib.import_module(home)
        value = module if colon and not attribute else getattr(module, attribute or name)
        # The next access finds the name in the package.
        setattr(sys.modules[package], name, value)
        return value

    return load
