"""The options of a consumer are described in both of its classes."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

from raymq.client.consume.async_consumer import AsyncConsumer
from raymq.client.consume.consumer import Consumer
from raymq.client.consume.consumer_config import ConsumerConfig


@pytest.mark.parametrize("described", [Consumer, AsyncConsumer])
def test_every_option_is_described(described: type) -> None:
    options = [each.name for each in dataclasses.fields(ConsumerConfig)]
    text = inspect.getdoc(described) or ""
    assert [name for name in options if f"\n    {name}: " not in text] == []
