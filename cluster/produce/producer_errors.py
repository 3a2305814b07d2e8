"""The errors of calls that no retry can mend."""

from __future__ import annotations

from raymq.store.errors import Rejected


def closed_error() -> Rejected:
    """The error of every call of a closed producer."""
    return Rejected("the producer is closed; make another one", field="producer", limit="open")


def pickle_error(method: str) -> Rejected:
    """The error of pickling a producer. Args: `method` of Cluster makes such a producer."""
    return Rejected(
        "a producer has open connections and does not pickle: pickle the Cluster and call "
        f"cluster.{method}() where it is used",
        field="pickle",
    )
