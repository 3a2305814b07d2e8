"""The options of format("raymq"): Kafka's names and values, each checked with one line that names it. No Spark."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from raymq.spark.offsets import EARLIEST, LATEST, Position, TopicQueue
from raymq.spark.source_options import OPTIONS, TOKEN_VARIABLE, SourceOptions, Subscription
from raymq.store.base.errors import Rejected
from raymq.store.records.requests import MessageSelector

NEEDED = {"raymq.address": "raymq://127.0.0.1:7000", "raymq.token": "secret", "subscribe": "t"}
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "spark.md"


def parse(**options: str) -> SourceOptions:
    return SourceOptions.parse({**NEEDED, **options})


def check_refused(field: str, words: str, **options: str | None) -> Rejected:
    given = {name: value for name, value in {**NEEDED, **options}.items() if value is not None}
    with pytest.raises(Rejected, match=words) as refused:
        SourceOptions.parse(given).batch_positions()
    assert refused.value.field == field
    assert "\n" not in str(refused.value)
    return refused.value


def test_options_have_kafkas_defaults() -> None:
    options = parse()
    assert options.subscription == Subscription(topics=("t",))
    starting, ending = options.batch_positions()
    assert (starting.value, ending.value) == (EARLIEST, LATEST)
    assert options.stream_position().value == LATEST
    assert (options.fail_on_data_loss, options.include_headers) == (True, False)
    assert (options.min_partitions, options.max_offsets_per_trigger) == (1, None)
    assert (options.read_from, options.without_match) == ("leader", "error")


def test_a_filter_is_checked_and_there_is_one_at_most() -> None:
    assert parse().selector is None
    assert parse(tags="new || paid").selector == MessageSelector("TAG", "new || paid")
    assert parse(SQL="price > 5").selector == MessageSelector("SQL92", "price > 5")
    check_refused("tags", "both given", tags="a", sql="price > 5")


def test_names_may_be_lower_cased_and_those_of_spark_are_passed_over() -> None:
    options = SourceOptions.parse(
        {
            **NEEDED,
            "startingoffsets": "EARLIEST",
            "FailOnDataLoss": "False",
            "checkpointlocation": "/tmp/c",
            "path": "x",
        }
    )
    assert options.stream_position() == Position("startingOffsets", "offset", EARLIEST)
    assert options.fail_on_data_loss is False


def test_an_unknown_option_is_refused_with_the_list_of_the_known_ones() -> None:
    error = check_refused("kafka.bootstrap.servers", "unknown", **{"kafka.bootstrap.servers": "a"})
    assert all(option.name in str(error) for option in OPTIONS)


@pytest.mark.parametrize(
    "given", [{}, {**NEEDED, "provider": "raymq", "option.subscribe": "t", "owner": "root"}]
)
def test_a_saved_table_is_refused_with_what_to_use(given: dict[str, str]) -> None:
    with pytest.raises(Rejected, match="options of a saved table .*CREATE TEMPORARY VIEW"):
        SourceOptions.parse(given)


def test_exactly_one_option_says_what_is_read() -> None:
    check_refused("subscribe", "none is given", subscribe=None)
    check_refused("subscribe", "subscribe and assign are given", assign='{"t": [0]}')
    options = parse(subscribe="b, a,b")
    assert options.subscription.topics == ("b", "a")
    given = {**NEEDED, "assign": '{"t": [1, 0], "a": [2]}'}
    del given["subscribe"]
    chosen = SourceOptions.parse(given).subscription.queues
    assert chosen == (TopicQueue("a", 2), TopicQueue("t", 0), TopicQueue("t", 1))


def test_offsets_are_words_or_kafkas_json() -> None:
    starting, ending = parse(
        startingOffsets='{"t": {"0": 23, "1": -2}}', endingOffsets='{"t": {"0": 30, "1": -1}}'
    ).batch_positions()
    assert starting.value == {TopicQueue("t", 0): 23, TopicQueue("t", 1): EARLIEST}
    assert ending.value == {TopicQueue("t", 0): 30, TopicQueue("t", 1): LATEST}


def test_a_time_for_all_wins_over_a_time_for_each_and_that_over_offsets() -> None:
    each = '{"t": {"0": 7}}'
    options = parse(startingOffsets="earliest", startingOffsetsByTimestamp=each)
    assert options.starting is not None
    assert (options.starting.kind, options.starting.value) == ("time", {TopicQueue("t", 0): 7})
    options = parse(endingOffsetsByTimestamp=each, endingTimestamp="9", endingOffsets="latest")
    assert options.ending == Position("endingTimestamp", "time", 9)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("startingOffsets", "yesterday", "earliest, latest, or"),
        ("startingOffsets", "latest", "empty; use earliest or an offset"),
        ("startingOffsets", '{"t": {"0": -1}}', "empty"),
        ("endingOffsets", "earliest", "empty; use latest"),
        ("endingOffsets", '{"t": {"0": -2}}', "empty"),
        ("startingOffsets", '{"t": {"0": -3}}', "queue 0 has -3; use a whole number, -2 or more"),
        ("startingOffsets", '{"t": {"0": true}}', "queue 0 has True"),
        ("startingOffsets", '{"t": {"x": 1}}', "a queue 'x'"),
        ("startingOffsets", '{"t": [1]}', r"has \[1\]"),
        ("startingOffsets", "{t", "not JSON"),
        ("startingOffsetsByTimestamp", '{"t": {"0": -1}}', "0 or more"),
        ("startingTimestamp", "2026-01-01", "milliseconds"),
        ("startingOffsetsByTimestampStrategy", "earliest", "'error' or 'latest'"),
        ("minPartitions", "0", "1 or more"),
        ("maxOffsetsPerTrigger", "1.5", "1 or more"),
        ("failOnDataLoss", "no", "'true' or 'false'"),
        ("includeHeaders", "", "'true' or 'false'"),
        ("readFrom", "follower", "'leader' or 'nearest'"),
        ("tags", "||", "names no tag"),
        ("sql", "price >", "the end at character 8"),
        ("sql", "", "sql is empty"),
        ("raymq.address", "127.0.0.1:7000", "raymq://host:port"),
        ("raymq.address", "raymq://host", "raymq://host:port"),
        ("raymq.address", " ", "missing"),
        ("subscribe", "a,,b", "separated by commas"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_right(name: str, value: str, words: str) -> None:
    check_refused(name, words, **{name: value})


def test_a_wrong_pattern_or_assignment_is_refused() -> None:
    check_refused("subscribePattern", "regular expression", subscribe=None, subscribePattern="(")
    for value in ("[0]", "{}", '{"t": []}', '{"t": [-1]}', '{"t": 0}', "{"):
        check_refused("assign", "write it like", subscribe=None, assign=value)


def test_the_token_may_come_from_the_environment_of_the_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    check_refused("raymq.token", TOKEN_VARIABLE, **{"raymq.token": None})
    monkeypatch.setenv(TOKEN_VARIABLE, "other\n")
    given = {name: value for name, value in NEEDED.items() if name != "raymq.token"}
    assert SourceOptions.parse(given).token == "other"


def test_several_addresses_are_kept_in_order() -> None:
    both = parse(**{"raymq.address": "raymq://a:1, raymq+tls://b:2"})
    assert both.addresses == ("raymq://a:1", "raymq+tls://b:2")


def test_an_ending_of_a_stream_is_refused() -> None:
    with pytest.raises(Rejected, match="a stream has no end") as refused:
        parse(endingTimestamp="5").stream_position()
    assert refused.value.field == "endingTimestamp"


def test_the_documentation_has_each_option_with_its_default() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| (.+?) \| (.+?) \| (.+) \|$", DOCUMENT.read_text(), re.M)
    shown = {name: rest for name, *rest in rows}
    for option in OPTIONS:
        where = "" if option.used_by == "both" else f"{option.used_by} only: "
        assert shown.get(option.name) == [option.type, option.default, where + option.meaning]
