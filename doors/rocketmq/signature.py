"""Signatures of requests: HMAC-SHA1 over the fields and the body, in base64, under the secret of the access key.

Source: AclClientRPCHook, AclUtils#combineRequestContent, DefaultAuthenticationContextBuilder.
"""

from __future__ import annotations

import hmac
from base64 import b64encode

from .codes import MQVersion
from .command import RemotingCommand

#: the field with the name of the user
ACCESS_KEY = "AccessKey"
#: the field with the signature
SIGNATURE = "Signature"
#: what a request that is passed on does not have
CREDENTIALS = frozenset((ACCESS_KEY, SIGNATURE))
#: a field of queries, which is not of their header's class: clients up to V4_9_3 sign its fields alone
_UNIQUE_KEY_QUERY = "_UNIQUE_KEY_QUERY"


def sign(command: RemotingCommand, secret: bytes) -> str:
    """The signature of a request. `secret`: the secret key of the user, in UTF-8.

    The values of the fields are joined in the order of their names, without the signature, and the body follows.
    """
    fields = command.fields
    left_out = {SIGNATURE}
    if command.version <= MQVersion.V4_9_3:
        left_out.add(_UNIQUE_KEY_QUERY)
    text = "".join([fields[name] for name in sorted(fields) if name not in left_out])

    # A text that UTF-8 cannot hold comes from no frame.
    mac = hmac.new(secret, text.encode("utf-8", "replace"), "sha1")
    mac.update(command.body)
    return b64encode(mac.digest()).decode("ascii")


def signed(command: RemotingCommand, access_key: str, secret: bytes) -> RemotingCommand:
    """The request with the fields of a user's signature."""
    with_key = command._replace(fields={**command.fields, ACCESS_KEY: access_key})
    return with_key._replace(fields={**with_key.fields, SIGNATURE: sign(with_key, secret)})


def verify(command: RemotingCommand, secret: bytes) -> bool:
    """Whether a request has the signature under this secret. It takes the same time wherever both differ."""
    found = command.fields.get(SIGNATURE, "")
    return hmac.compare_digest(found.encode("utf-8", "replace"), sign(command, secret).encode())
