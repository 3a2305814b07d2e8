"""Base of clients with open connections: they do not pickle, and warn when they are dropped. No Ray."""

from __future__ import annotations

import warnings
from typing import ClassVar, NoReturn

from raymq.store.base.errors import Rejected


class OpenClient:
    """The base of clients with open connections, which do not pickle."""

    #: kind of client, and the method of Cluster that makes one
    made_as: ClassVar[tuple[str, str]]

    def __reduce__(self) -> NoReturn:
        kind, method = self.made_as
        raise Rejected(
            f"a {kind} has open connections and does not pickle: pickle the Cluster and call cluster.{method}() where "
            "it is used",
            field="pickle",
        )


def warn_unclosed(client: object, name: str, advice: str) -> None:
    """Warn as Python does about unclosed files: `python -X dev` shows the warning and the line that made `client`."""
    warnings.warn(f"unclosed {name}: {advice}", ResourceWarning, stacklevel=3, source=client)
