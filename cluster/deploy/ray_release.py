"""What differs between the releases of Ray that RayMQ runs with. Only this module asks which one is installed.

from   what Ray has
2.50   a read task of Ray Data can have a limit of rows
2.52   a Ray can demand a token (RAY_AUTH_MODE), and caches its mode and its token
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from raymq.store.base.errors import AnotherRay, Rejected

if TYPE_CHECKING:
    import pyarrow as pa
    from ray.data import ReadTask
    from ray.data.block import BlockMetadata


class Release(NamedTuple):
    """A minor version of Ray."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


#: the releases that are tested: these two, and some between them
OLDEST, NEWEST = Release(2, 49), Release(2, 60)
#: the first one that has a token
_TOKEN = Release(2, 52)
#: Ray's words for a driver of another version, with any white space
_MISMATCH = re.compile(
    r"Version mismatch.*?Ray: (\S+)\s+Python: (\S+).*?Ray: (\S+)\s+Python: (\S+)", re.DOTALL
)


def installed() -> str | None:
    """The version of Ray that this process has; None: none. Does not import Ray."""
    ray = sys.modules.get("ray")
    found: str | None = getattr(ray, "__version__", None)
    if found is not None:
        return found
    try:
        return importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        return None


def release_of(version: str) -> Release | None:
    """The release of a version; None: it is not written as Ray's versions are."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return None if found is None else Release(int(found[1]), int(found[2]))


def untested(version: str | None) -> str | None:
    """Why a version may not work, in words for a warning; None: it is one of those that RayMQ is made for.

    Raises: Rejected for one that is too old.
    """
    found = release_of(version or "")
    if found is None or found > NEWEST:
        return f"Ray {version or 'of an unknown version'} was not tested: RayMQ was tested with Ray up to {NEWEST}"
    if found < OLDEST:
        raise Rejected(
            f"Ray {version} is too old: install Ray {OLDEST} or newer",
            field="ray",
            limit=str(OLDEST),
            found=version,
        )
    return None


def has_token(version: str | None) -> bool:
    """Whether a Ray of this version can demand a token of its drivers."""
    found = release_of(version or "")
    return found is None or found >= _TOKEN


def own_auth_mode(environment: Mapping[str, str], version: str | None) -> str:
    """The RAY_AUTH_MODE of a Ray that `start` starts: "token" if Ray can and the environment names no other.

    Raises: Rejected for a token that this Ray cannot demand.
    """
    chosen = environment.get("RAY_AUTH_MODE", "").lower()
    if has_token(version):
        return chosen or "token"
    if chosen not in ("", "disabled"):
        raise Rejected(
            f"RAY_AUTH_MODE={chosen} needs Ray {_TOKEN}, and Ray {version} is installed: install a newer Ray, or "
            "unset RAY_AUTH_MODE",
            field="RAY_AUTH_MODE",
            limit="disabled",
            found=chosen,
        )
    return "disabled"


def tokenless(version: str | None) -> str:
    """What it means that a Ray of this version has no token."""
    return (
        f"Ray {version} has no token (Ray {_TOKEN} and newer have one): any program that reaches its ports may run "
        "code as this user, and read and write every message"
    )


def access_question(version: str | None) -> str:
    """What to look at when a Ray does not let this process in, which has a Ray of this version: the end of a question.

    A Ray that knows no token learns nothing from one that demands it, not even its version.
    """
    if has_token(version):
        return "does this process have its token (RAY_AUTH_MODE, RAY_AUTH_TOKEN_PATH)?"
    return (
        f"is it Ray {version}, as this process has? From Ray {_TOKEN} on it may demand a token, which Ray {version} "
        "cannot give"
    )


def reload_authentication() -> None:
    """Make Ray read its variables and its token again.

    It caches the mode when it is imported and the token when it is first used, for the life of the process. A
    program that changes from one Ray to another would present the first one's token to the second.
    """
    if not has_token(installed()):
        return
    # An extension module without types. The mode comes first: a call of Ray that is still ending may read the token.
    raylet = importlib.import_module("ray._raylet")
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


def client_address() -> str:
    """host:port of the Ray Client server to which this process is connected. Ray has no public name for it."""
    address: str = sys.modules["ray.util.client"].ray.get_context().client_worker._conn_str
    return address


def mismatch(text: str, address: str) -> AnotherRay | None:
    """The error of a driver that Ray refuses for its version; None: Ray's message says something else."""
    found = _MISMATCH.search(text)
    if found is None:
        return None
    theirs, their_python, ours, our_python = found.groups()
    return _another(
        address, f"{theirs} with Python {their_python}", f"{ours} with Python {our_python}"
    )


def check_same(recorded: str | None, address: str) -> None:
    """Check this process's version against that of the Ray at an address. Args: `recorded`: None: it is not known.

    Ray's own check comes after its first calls, which another version may not understand, or refuse without a token.
    Raises: AnotherRay.
    """
    found = installed()
    if None not in (recorded, found) and recorded != found:
        raise _another(address, str(recorded), str(found))


def _another(address: str, theirs: str, ours: str) -> AnotherRay:
    return AnotherRay(
        f"the Ray at {address} is Ray {theirs}, this process has Ray {ours}, and Ray wants the same on both sides. "
        "Install the cluster's here, or connect by raymq://host:port, which needs no Ray. If Ray was upgraded while "
        "the cluster ran: `raymq stop`, then `raymq start`",
        field="ray",
        limit=theirs,
        found=ours,
    )


def read_task(
    read: Callable[[], Iterable[pa.Table]],
    metadata: BlockMetadata,
    *,
    schema: pa.Schema,
    row_limit: int | None,
) -> ReadTask:
    """A read task of Ray Data. Args: `row_limit`: as Ray Data asks for it; None: it did not, or cannot."""
    from ray.data import ReadTask

    limits: dict[str, Any] = {} if row_limit is None else {"per_task_row_limit": row_limit}
    return ReadTask(read, metadata, schema=schema, **limits)
