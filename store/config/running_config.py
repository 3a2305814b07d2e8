"""The options of an open store: those that may change while it is open do so here, in one place for all its readers.

A service keeps this object and reads an option where it uses it. A service that derives something from options compares
`version` at its next turn. Imports neither pyarrow nor numpy.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from raymq.store.base.errors import Rejected

from .store_config import WHILE_RUNNING, StoreConfig, check_in_cluster

logger = logging.getLogger("raymq.store")


class RunningConfig(StoreConfig):
    """The options with which a store was opened, and those that were changed since.

    Threads: one at a time calls `follow`; any reads. Each option is an attribute, so that no reader sees half of one.
    """

    #: the options as the store was opened
    opened: StoreConfig
    #: grows with each change
    version: int
    #: the options that were changed, and their values, which may be those of `opened`
    changed: Mapping[str, Any]

    @classmethod
    def of(cls, config: StoreConfig) -> RunningConfig:
        """A store's options when it is opened. One that is open already keeps its own."""
        # A copy by `dataclasses.replace` is none of an open store.
        if isinstance(config, cls) and "opened" in vars(config):
            return config
        made = cls(**{each.name: getattr(config, each.name) for each in fields(StoreConfig)})
        made._set(opened=config, version=0, changed={})
        return made

    def follow(self, changed: Mapping[str, object]) -> bool:
        """Take the options that were changed since the store was opened. The others are as it was opened.

        What this version does not know, or does not take, is passed over: a later version has written it.
        Returns: whether any value is another one now.
        """
        taken = {name: value for name, value in changed.items() if _is_taken(name, value)}
        found = {
            name: value
            for name in WHILE_RUNNING
            if (value := taken.get(name, getattr(self.opened, name))) != getattr(self, name)
        }
        self._set(**found, changed=taken)
        if found:
            # Last: a reader that sees it sees the values.
            self._set(version=self.version + 1)
        return bool(found)

    def _set(self, **values: object) -> None:
        for name, value in values.items():
            # Only here: for all others the options are frozen.
            object.__setattr__(self, name, value)


def _is_taken(name: str, value: object) -> bool:
    option = WHILE_RUNNING.get(name)
    if option is None:
        return False
    try:
        check_in_cluster(option, value)
    except Rejected as error:
        logger.warning("a changed option has no effect here: %s", error)
        return False
    return True
