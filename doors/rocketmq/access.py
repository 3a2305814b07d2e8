"""Who may use the server: requests are signed with the secret key of a user, as RocketMQ's clients do.

Source: AclClientRPCHook, PlainAccessValidator.
"""

from __future__ import annotations

import ipaddress
from typing import Literal, TypeAlias

from raymq.store.base.errors import Rejected

from .answers import Refused
from .codes import ResponseCode
from .command import RemotingCommand
from .signature import ACCESS_KEY, verify

#: the user of a cluster. Its secret key is the token
USER = "raymq"

#: "key": every request is signed. "open": none needs to be, on this machine alone
Access: TypeAlias = Literal["key", "open"]


class AccessCheck:
    """Refuses requests that are not signed as they must be."""

    def __init__(self, access: Access, token: str, host: str) -> None:
        """Args: `token`: of the cluster. `host`: where the server listens.

        Raises: Rejected for "open" on an address that other machines reach.
        """
        if access == "open" and not _is_loopback(host):
            raise Rejected(
                f"access='open' takes requests from each machine that reaches {host}; listen on 127.0.0.1, or use "
                "access='key'",
                field="access",
                limit="key, unless the host is 127.0.0.1",
                found=access,
            )
        self._secret = token.encode() if access == "key" else None

    def check(self, request: RemotingCommand) -> None:
        """Refuse a request without the user's signature: its connection ends then. Raises: Refused."""
        if self._secret is None:
            return
        user = request.fields.get(ACCESS_KEY)
        if user is None:
            raise Refused(
                ResponseCode.NO_PERMISSION,
                f"the request is not signed: give the client AccessKey {USER} and the cluster's token as SecretKey",
            )
        if user != USER or not verify(request, self._secret):
            raise Refused(
                ResponseCode.NO_PERMISSION,
                f"the signature is wrong: AccessKey must be {USER}, and SecretKey the cluster's token",
            )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
