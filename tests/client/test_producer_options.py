"""The options of a producer are the same wherever they can be given, and are described."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from raymq.client.produce.async_producer import AsyncProducer
from raymq.client.produce.producer import Producer
from raymq.client.produce.producer_config import ProducerConfig
from raymq.cluster.cluster import Cluster

DEFAULTS = {each.name: each.default for each in dataclasses.fields(ProducerConfig)}


@pytest.mark.parametrize(
    "function", [Producer, AsyncProducer, Cluster.producer, Cluster.async_producer]
)
def test_every_option_is_a_keyword_with_the_default_of_the_config(
    function: Callable[..., Any],
) -> None:
    options = {
        name: each.default
        for name, each in inspect.signature(function).parameters.items()
        if each.kind is inspect.Parameter.KEYWORD_ONLY and name != "clock"
    }
    assert options == DEFAULTS


@pytest.mark.parametrize("described", [Producer, AsyncProducer])
def test_every_option_is_described(described: type) -> None:
    text = inspect.getdoc(described) or ""
    assert [name for name in DEFAULTS if f"\n    {name}: " not in text] == []
