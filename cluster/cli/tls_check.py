"""Checks a certificate by the handshake that a client and a shard would have."""

from __future__ import annotations

import ssl
from typing import NamedTuple

#: OpenSSL's error numbers
_EXPIRED, _NOT_YET = 10, 9


class Validity(NamedTuple):
    """The facts of a certificate that a client accepts."""

    #: seconds since 1970
    end_s: float
    #: "IP Address:127.0.0.1", "DNS:localhost"
    names: tuple[str, ...]


class CertificateRefused(Exception):
    """A client that trusts only this authority does not accept the certificate."""


def validity(certificate: str, key: str, ca: bytes) -> Validity:
    """The validity of a certificate for clients that trust `ca`, whatever their address for it is.

    Args: `certificate`, `key`: paths of PEM files that are a pair. `ca`: the authority's PEM bytes.
    Raises: CertificateRefused with the reason.
    """
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate, key)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.load_verify_locations(cadata=ca.decode("ascii"))

    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    there = server.wrap_bio(to_server, to_client, server_side=True)
    here = client.wrap_bio(to_client, to_server)

    try:
        while not (_step(here) & _step(there)):
            continue
    except ssl.SSLCertVerificationError as error:
        if error.verify_code == _EXPIRED:
            raise CertificateRefused("it (or its authority's) has expired") from error
        if error.verify_code == _NOT_YET:
            raise CertificateRefused("it is not valid yet: is the clock right?") from error
        raise CertificateRefused(f"{error.verify_message}") from error

    facts = here.getpeercert() or {}
    names = facts.get("subjectAltName", ())
    end = facts.get("notAfter", "")
    return Validity(
        float(ssl.cert_time_to_seconds(str(end))), tuple(":".join(map(str, each)) for each in names)
    )


def _step(side: ssl.SSLObject) -> bool:
    """Continue a handshake. Returns: whether this side has finished."""
    try:
        side.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True
