"""Signatures of requests, against values worked out by hand."""

from __future__ import annotations

import hashlib
import hmac
from base64 import b64encode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymq.doors.rocketmq.codes import MQVersion, RequestCode
from raymq.doors.rocketmq.command import RemotingCommand
from raymq.doors.rocketmq.signature import ACCESS_KEY, SIGNATURE, sign, signed, verify

SECRET = b"12345678"
QUERY = {"topic": "T", "key": "k", "_UNIQUE_KEY_QUERY": "true", ACCESS_KEY: "user"}


def mac_of(text: bytes) -> str:
    return b64encode(hmac.new(SECRET, text, hashlib.sha1).digest()).decode()


def test_the_values_are_signed_in_the_order_of_their_names_and_then_the_body():
    fields = {"b": "2", "a": "1", "AccessKey": "user", "ä": "ö", SIGNATURE: "old"}
    command = RemotingCommand(RequestCode.SEND_MESSAGE_V2, 1, fields=fields, body=b"body")
    assert sign(command, SECRET) == mac_of("user12öbody".encode())
    assert sign(command._replace(body=memoryview(b"body")), SECRET) == sign(command, SECRET)


def test_a_known_text_has_a_known_signature():
    # RFC 2202, test case 2.
    command = RemotingCommand(1, 1, fields={"a": "what do ya want "}, body=b"for nothing?")
    assert sign(command, b"Jefe") == "7/zfauXrL6LSdBbV8YTfnCWafHk="


@pytest.mark.parametrize(
    ("version", "signed_text"),
    [
        (MQVersion.V4_9_3, b"userkT"),
        (MQVersion.V4_9_3 + 1, b"usertruekT"),
        (MQVersion.V5_3_3, b"usertruekT"),
    ],
)
def test_old_clients_do_not_sign_the_field_that_is_not_of_the_header_class(version, signed_text):
    command = RemotingCommand(RequestCode.QUERY_MESSAGE, 1, fields=QUERY, version=version)
    assert sign(command, SECRET) == mac_of(signed_text)


@given(st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=4), st.binary(max_size=9))
def test_a_signed_request_is_verified_and_no_other(fields, body):
    command = signed(RemotingCommand(10, 1, fields=fields, body=body), "user", SECRET)
    assert command.fields[ACCESS_KEY] == "user"
    assert verify(command, SECRET)
    assert not verify(command, b"another")
    assert not verify(command._replace(body=body + b"x"), SECRET)
    assert not verify(command._replace(fields={**command.fields, "more": "x"}), SECRET)


@pytest.mark.parametrize("signature", [None, "", "ä", "\ud800", "A" * 28])
def test_a_request_with_another_signature_or_none_is_refused(signature):
    fields = {"a": "1"} if signature is None else {"a": "1", SIGNATURE: signature}
    assert not verify(RemotingCommand(10, 1, fields=fields), SECRET)
