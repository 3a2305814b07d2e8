"""TLS of the shards' connections, with the certificate variables that Ray itself uses.

With RAY_USE_TLS=1 in the environment of `start`, every shard serves with TLS. It uses the certificate
and the key of its own node (RAY_TLS_SERVER_CERT, RAY_TLS_SERVER_KEY, as for Ray's own ports).
Clients check the certificate against RAY_TLS_CA_CERT. An endpoint without encryption is "host:port", one with TLS is
"tls://host:port". For users these are raymq:// and raymq+tls:// URLs.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from raymq.store.base.errors import (
    NotReached,
    RayMQError,
    Rejected,
    Unavailable,
    UntrustedServer,
)
from raymq.store.base.files import Files

USE_TLS = "RAY_USE_TLS"
SERVER_CERT = "RAY_TLS_SERVER_CERT"
SERVER_KEY = "RAY_TLS_SERVER_KEY"
CA_CERT = "RAY_TLS_CA_CERT"

#: prefix of an endpoint with TLS
TLS_PREFIX = "tls://"
PLAIN_URL, TLS_URL = "raymq://", "raymq+tls://"
PORT_MAX = 65_535


#: the certificate and key of a server, PEM
ServerIdentity: TypeAlias = tuple[bytes, bytes]


def wanted(environment: Mapping[str, str]) -> bool | None:
    """Whether RAY_USE_TLS asks for TLS, or None when it is not set.

    Raises: Rejected for a value that Ray does not know.
    """
    if USE_TLS not in environment:
        return None
    value = environment[USE_TLS].strip().lower()
    if value in ("1", "true"):
        return True
    if value in ("", "0", "false"):
        return False
    raise Rejected(f"{USE_TLS}={value}: use 1 (TLS) or 0", field=USE_TLS, limit="0|1")


def server_identity(environment: Mapping[str, str], files: Files) -> ServerIdentity:
    """The certificate and key of this node.

    Raises: Rejected naming the variable: not set, not readable, not PEM, or not a pair.
    """
    certificate = _path(environment, SERVER_CERT)
    key = _path(environment, SERVER_KEY)
    identity = (_read(SERVER_CERT, certificate, files), _read(SERVER_KEY, key, files))
    # It takes 20 ms, which clients without TLS need not spend.
    import ssl

    try:
        # An empty passphrase: otherwise the process would wait for input at a terminal that it does not have.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            certificate, key, password=lambda: ""
        )
    except (ssl.SSLError, OSError, ValueError) as error:
        raise Rejected(
            f"{SERVER_CERT}={certificate} and {SERVER_KEY}={key} are not a certificate and its "
            f"unencrypted key ({error}): give a PEM certificate and the key it was made with",
            field=SERVER_CERT,
            path=certificate,
        ) from error

    return identity


def trusted(environment: Mapping[str, str], files: Files) -> bytes | None:
    """The PEM certificates in RAY_TLS_CA_CERT, or None when it is not set, and the system's authorities are used.

    Raises: Rejected when the file cannot be used.
    """
    path = environment.get(CA_CERT)
    return read_ca(path, files, name=CA_CERT) if path else None


def read_ca(path: str | os.PathLike[str], files: Files, *, name: str = "ca") -> bytes:
    """The PEM certificates in a file, checked. Raises: Rejected (field `name`)."""
    file_name = os.fspath(path)
    pem = _read(name, file_name, files)
    import ssl

    try:
        ssl.create_default_context(cadata=pem.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise Rejected(
            f"{name}={file_name} holds no PEM certificate ({error}): give the certificate of the "
            "authority that signed the shards' certificates",
            field=name,
            path=file_name,
        ) from error
    return pem


def check_exposed(host: str, *, tls: bool, insecure: bool) -> bool:
    """Whether other machines can read the traffic of `host`: not loopback, and without TLS.

    Raises: Rejected when they can and `insecure` does not accept it.
    """
    if tls or is_loopback(host):
        return False
    if not insecure:
        raise Rejected(
            f"host {host} is reachable from other machines and the connection is not encrypted: "
            f"turn TLS on ({USE_TLS}=1, {SERVER_CERT}, {SERVER_KEY} and {CA_CERT}, here and where "
            "Ray's nodes are started), keep 127.0.0.1, or accept that the token and every message "
            "cross the network in the clear with insecure=True (command line: --insecure)",
            field="host",
            limit="127.0.0.1, or TLS",
        )
    return True


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`. A name other than localhost counts as reachable by others."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def parse_url(url: str) -> str | None:
    """The endpoint of raymq://host:port or raymq+tls://host:port, or None for anything else.

    Raises: Rejected for one of these schemes without host or port.
    """
    for scheme, prefix in ((PLAIN_URL, ""), (TLS_URL, TLS_PREFIX)):
        if url.startswith(scheme):
            endpoint = url.removeprefix(scheme).rstrip("/")
            host, _, port = endpoint.rpartition(":")
            if not host or not port.isdecimal():
                raise Rejected(f"{url!r}: use {scheme}host:port", field="target")
            if not 0 < int(port) <= PORT_MAX:
                message = f"{url!r}: {port} is no port; use 1 to {PORT_MAX}"
                raise Rejected(message, field="target", limit=PORT_MAX)
            return prefix + endpoint
    return None


def url_of(endpoint: str) -> str:
    """The inverse of `parse_url`."""
    if endpoint.startswith(TLS_PREFIX):
        return TLS_URL + endpoint.removeprefix(TLS_PREFIX)
    return PLAIN_URL + endpoint


def failure(words: str, endpoint: str) -> RayMQError:
    """The error of a connection that gRPC describes with `words`, with advice if TLS is the cause.

    A certificate that is not accepted will not be after a retry. Other failures may pass: a port can
    belong to another process until the endpoint is looked up again.
    """
    if endpoint.startswith(TLS_PREFIX):
        if "certificate has expired" in words or "certificate is not yet valid" in words:
            return UntrustedServer(
                f"{endpoint}: the shard's certificate, or its authority's, is expired or not yet valid "
                f"({words.rpartition(': ')[2]}): renew it where {SERVER_CERT} names it and start "
                "the shard again, or set the clock of this machine",
                field=SERVER_CERT,
            )

        if "certificate verify failed" in words:
            return UntrustedServer(
                f"{endpoint}: the shard's certificate was not signed by an authority that this "
                f"process trusts ({words.rpartition(': ')[2]}): give the right one with ca=... or "
                f"{CA_CERT}",
                field="ca",
            )

        if "is not in peer certificate" in words:
            return UntrustedServer(
                f"{endpoint}: the shard's certificate is for another address: make one whose "
                "subjectAltName has this address (IP:... for a number)",
                field=SERVER_CERT,
            )

        if "wrong version number" in words:
            words = f"the shard serves without TLS: use {PLAIN_URL}, or start it with {USE_TLS}=1"
    elif "failed to connect" in words and "Socket closed" in words:
        words = f"the connection was closed at once: if the shard serves with TLS, use {TLS_URL}"

    if "Connection refused" in words:
        words = "nothing listens there: `raymq start` on the cluster's directory starts it again"
        return NotReached(f"{endpoint}: {words}", endpoint=endpoint)
    return Unavailable(f"{endpoint}: {words}", endpoint=endpoint)


def _path(environment: Mapping[str, str], name: str) -> str:
    path = environment.get(name)
    if not path:
        raise Rejected(
            f"{USE_TLS}=1 needs {name}, which is not set on this node: set it to a PEM file "
            "where Ray's node is started",
            field=name,
        )
    return path


def _read(name: str, path: str, files: Files) -> bytes:
    try:
        return files.read_file(Path(path))
    except OSError as error:
        raise Rejected(
            f"{name}={path} cannot be read ({error.strerror or error}): name a PEM file that "
            "this user may read",
            field=name,
            path=path,
        ) from error
