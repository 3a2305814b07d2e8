"""The options of the stores of a cluster: each is reachable from a start, kept, and refused before anything starts."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from raymq.cluster.record.cluster_record import (
    ClusterRecord,
    StartOptions,
    load_record,
    new_record,
    resume_record,
    save_record,
    store_config,
)
from raymq.cluster.record.paths import ClusterPaths
from raymq.cluster.record.rocketmq_options import NOT_TAKEN
from raymq.cluster.record.store_options import (
    KEYWORDS,
    TAKEN,
    StoreOptions,
    check_config,
    parse_config,
)
from raymq.cluster.start import plan_start
from raymq.store.base.errors import Corrupt, Rejected
from raymq.store.base.files import Files
from raymq.store.config.option import Option
from raymq.store.config.store_config import IN_CLUSTER, OPTIONS, StoreConfig

#: as a version wrote it that knew six options of the stores
OLD_RECORD = """\
{
  "format": 1, "name": "orders", "cluster_id": "0123456789abcdef0123456789abcdef", "shards": 2, "replicas": 1,
  "flush": "async", "segment_size_bytes": 67108864, "ephemeral": true, "host": "127.0.0.1", "nodes": null,
  "placement": null, "generations": null, "least_epochs": null, "unclean_recoveries": [], "first_replicas": null,
  "first_nodes": null, "added_replicas": 0, "drained_nodes": [], "formed": false, "first_shards": null,
  "formed_shards": null, "joined_shards": null, "tls": false, "insecure": false, "transient_pool": false,
  "file_reserved_hours": 48, "producer_expiry_hours": 168, "catch_up_bytes_per_s": 0
}
"""


def other_value(option: Option) -> Any:
    """A value that an option takes, and that is not its default."""
    if option.kind == "bool":
        return not option.default
    if option.is_number:
        least = int(option.least or 0)
        return least if least != option.default else least + option.multiple_of
    return {"delete_when": "05;17", "message_delay_level": "1s 1m", "flush": "async"}[option.name]


def record(**config: Any) -> ClusterRecord:
    return new_record(StartOptions(config=config))


def test_every_option_is_in_a_cluster_or_says_why_not() -> None:
    for option in OPTIONS.values():
        assert (option.changes is None) == bool(option.not_in_cluster), option.name
    assert set(KEYWORDS) < set(IN_CLUSTER)
    assert set(TAKEN) == set(IN_CLUSTER) - set(KEYWORDS)


def test_the_types_of_config_are_those_of_the_store() -> None:
    kinds = {name: each.__name__ for name, each in get_type_hints(StoreOptions).items()}
    assert kinds == {name: option.kind for name, option in TAKEN.items()}


def test_an_option_of_rocketmq_is_either_there_or_named_with_the_reason() -> None:
    there = {name for each in OPTIONS.values() for name in each.rocketmq.split(", ") if name}
    assert not there & set(NOT_TAKEN)


@pytest.mark.parametrize("name", TAKEN)
def test_each_option_reaches_the_store_and_is_kept_for_later_starts(
    tmp_path: Path, name: str
) -> None:
    paths, files, value = ClusterPaths(tmp_path), Files(), other_value(TAKEN[name])
    wanted = StartOptions(config={name: value})
    made = plan_start(paths, wanted, ephemeral=False, files=files).record
    assert asdict(store_config(made)) == {**asdict(store_config(record())), name: value}

    save_record(paths, made, files)
    later = plan_start(paths, StartOptions(), ephemeral=False, files=files).record
    assert later == made
    assert getattr(store_config(later), name) == value


@pytest.mark.parametrize("name", TAKEN)
def test_a_later_start_changes_an_option_unless_the_first_one_decides_it(name: str) -> None:
    option, stored = TAKEN[name], record()
    value = other_value(option)
    same = resume_record(stored, StartOptions(config={name: option.default}))
    assert store_config(same) == store_config(stored)

    wanted = StartOptions(config={name: value})
    if option.changes != "first start":
        assert getattr(store_config(resume_record(stored, wanted)), name) == value
        return
    with pytest.raises(Rejected, match=f"{name}=.* was made with {name}=") as refused:
        resume_record(stored, wanted)
    assert (refused.value.field, refused.value.limit) == (name, option.default)
    assert resume_record(record(**{name: value}), wanted).config == {name: value}


def test_options_that_were_given_at_different_starts_hold_together() -> None:
    first = record(flush_interval_ms=200, delete_when="05")
    later = resume_record(
        first, StartOptions(config={"delete_when": "06", "commit_least_pages": 1})
    )
    assert later.config == {"flush_interval_ms": 200, "delete_when": "06", "commit_least_pages": 1}


def test_a_record_without_further_options_opens_with_the_defaults(tmp_path: Path) -> None:
    paths, files = ClusterPaths(tmp_path), Files()
    paths.cluster.write_text(OLD_RECORD)
    stored = load_record(paths, files)
    assert stored is not None
    assert stored.config == {}
    assert store_config(stored) == StoreConfig(
        flush="async", segment_size_bytes=64 << 20, file_reserved_hours=48
    )
    save_record(paths, stored, files)
    new = {"config": {}, "rocketmq_port": None, "rocketmq_access": "key"}
    assert json.loads(paths.cluster.read_text()) == {**json.loads(OLD_RECORD), **new}


def test_a_record_with_an_option_of_a_later_version_is_not_changed(tmp_path: Path) -> None:
    paths, files = ClusterPaths(tmp_path), Files()
    save_record(paths, record(), files)
    body = {**json.loads(paths.cluster.read_text()), "config": {"a_later_option": 1}}
    paths.cluster.write_text(json.dumps(body))
    with pytest.raises(Corrupt, match="a_later_option. Use the RayMQ version that wrote it"):
        load_record(paths, files)
    assert json.loads(paths.cluster.read_text()) == body


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("flush_interval_ms", 0, "flush_interval_ms is 0; it must be a whole number, 1 to 2,147"),
        ("flush_interval_ms", 1.5, "flush_interval_ms is 1.5; it must be a whole number"),
        ("flush_interval_ms", True, "flush_interval_ms is True; it must be a whole number"),
        ("flush_least_pages", "4", "flush_least_pages is '4'; it must be a whole number, 0 to"),
        ("max_message_bytes", 64 << 20, "is 67108864; in a cluster it must be 1 to 33,554,432"),
        ("timer_max_delay_s", 86_400 * 4, "is 345600; in a cluster it must be 1 to 259,200"),
        ("consume_queue_file_size_bytes", 30, "is 30; it must be .* a multiple of 20"),
        ("warm_mapped_file", "yes", "warm_mapped_file is 'yes'; it must be True or False"),
        ("delete_when", "24", "delete_when is '24'; use hours from 00 to 23"),
        ("delete_when", 4, "delete_when is 4; it must be text"),
        ("message_delay_level", "1x", "message_delay_level is '1x'; give numbers with s, m, h"),
        ("disk_max_used_space_ratio", 99, "is 99; it must be a whole number, 10 to 95"),
    ],
)
def test_a_wrong_value_is_refused_with_the_range_before_anything_is_written(
    tmp_path: Path, name: str, value: Any, message: str
) -> None:
    wanted = StartOptions(config={name: value})
    with pytest.raises(Rejected, match=message) as refused:
        plan_start(ClusterPaths(tmp_path), wanted, ephemeral=False, files=Files())
    assert refused.value.field == name
    assert refused.value.limit
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("flush_intervall_ms", r"did you mean flush_interval_ms\?"),
        ("flushIntervalCommitLog", "RocketMQ's flushIntervalCommitLog is flush_interval_ms here"),
        ("deleteConsumeQueueFilesInterval", "is delete_files_interval_ms here"),
        ("brokerRole", "RayMQ does not have RocketMQ's brokerRole. Replication has its own"),
        ("flush", "give it as flush=... of `start`, or --flush"),
        ("file_reserved_hours", "or --file-reserved-hours"),
        ("store_host", "a cluster does not take it. Each replica writes the address"),
        ("commit_log_paths", "a cluster does not take it. Each replica has one directory"),
        ("colour", "docs/reference/configuration.md has all options"),
        (7, "config has no option 7"),
    ],
)
def test_a_name_that_is_no_option_is_refused_with_the_nearest_one_or_the_reason(
    name: Any, advice: str
) -> None:
    with pytest.raises(Rejected, match=advice) as refused:
        check_config({name: 1})
    assert (refused.value.field, refused.value.found) == ("config", name)


def test_config_must_be_a_dict() -> None:
    with pytest.raises(Rejected, match="give a dict of options"):
        check_config("flush_interval_ms=200")


def test_a_pool_that_has_no_room_for_one_append_is_refused_at_the_start(tmp_path: Path) -> None:
    wanted = StartOptions(transient_pool=True, config={"transient_pool_slice_bytes": 4096})
    with pytest.raises(Rejected, match="room for one append unit"):
        plan_start(ClusterPaths(tmp_path), wanted, ephemeral=False, files=Files())


# --- texts ----------------------------------------------------------------------------------------


def test_texts_become_values_of_the_options_types() -> None:
    texts = ["flush_interval_ms=200", "warm_mapped_file=on", "clean_file_forcibly=False"]
    assert parse_config([*texts, "delete_when=04;16", "message_delay_level=1s 5s"]) == {
        "flush_interval_ms": 200,
        "warm_mapped_file": True,
        "clean_file_forcibly": False,
        "delete_when": "04;16",
        "message_delay_level": "1s 5s",
    }
    assert parse_config([]) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("flush_interval_ms", "write NAME=VALUE"),
        ("flush_interval_ms=soon", "flush_interval_ms is 'soon'; it must be a whole number"),
        ("flush_interval_ms=", "flush_interval_ms is ''; it must be a whole number"),
        ("warm_mapped_file=maybe", "warm_mapped_file is 'maybe'; it must be True or False"),
        ("flush_interval=1", r"did you mean flush_interval_ms\?"),
    ],
)
def test_a_text_that_says_no_value_is_refused(text: str, message: str) -> None:
    with pytest.raises(Rejected, match=message):
        parse_config([text])


def test_an_option_has_one_value() -> None:
    assert parse_config(["flush_interval_ms=1"] * 2) == {"flush_interval_ms": 1}
    with pytest.raises(Rejected, match="flush_interval_ms is given twice, as 1 and 2"):
        parse_config(["flush_interval_ms=1", "flush_interval_ms=2"])
