"""Whether an endpoint is on this machine. Does not import Ray."""

from __future__ import annotations

import socket
from functools import lru_cache

from raymq.actors.protocol.tls import TLS_PREFIX


@lru_cache(maxsize=1024)
def is_local(endpoint: str) -> bool:
    """Whether host:port, with TLS tls://host:port, is an address of this machine: a socket can be bound to it.

    False for the name of an actor, and for a host that cannot be resolved.
    """
    host, _, port = endpoint.removeprefix(TLS_PREFIX).rpartition(":")
    if not port.isdecimal():
        return False
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            host.strip("[]"), 0, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, number) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True
