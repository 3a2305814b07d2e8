"""The options of the stores of a cluster: those that `start` and `set_config` take, and the values that were given.

`store/config/store_config.py` declares them. Some are arguments of `start` themselves (`KEYWORDS`).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

from raymq.store.base.errors import Rejected
from raymq.store.config.option import Option
from raymq.store.config.store_config import IN_CLUSTER, OPTIONS, WHILE_RUNNING, check_in_cluster

from .rocketmq_options import NOT_TAKEN


class RunningOptions(TypedDict, total=False):
    """The options that `Cluster.set_config` takes. `StoreConfig` has their meanings and defaults."""

    sync_flush_timeout_ms: int
    slave_timeout_ms: int
    flush_commit_log_timed: bool
    flush_interval_ms: int
    flush_least_pages: int
    flush_thorough_interval_ms: int
    commit_interval_ms: int
    commit_least_pages: int
    commit_thorough_interval_ms: int
    max_message_bytes: int
    snapshot_interval_bytes: int
    catch_up_bytes_per_s: int
    timer_wheel_enabled: bool
    timer_max_delay_s: int
    timer_congest_num_each_slot: int
    os_page_cache_busy_timeout_ms: int
    allocate_timeout_ms: int
    delete_when: str
    file_reserved_hours: float
    disk_max_used_space_ratio: int
    disk_space_clean_forcibly_ratio: int
    disk_space_warning_level_ratio: int
    clean_file_forcibly: bool
    delete_file_batch_max: int
    warm_mapped_file: bool
    delete_files_interval_ms: int
    producer_expiry_hours: float
    group_expiry_hours: float


class StoreOptions(TypedDict, total=False):
    """The options that `raymq.start` takes as `config`. `StoreConfig` has their meanings and defaults."""

    consume_queue_file_size_bytes: int
    message_index: bool
    max_hash_slot_num: int
    max_index_num: int
    sync_flush_timeout_ms: int
    slave_timeout_ms: int
    flush_commit_log_timed: bool
    flush_interval_ms: int
    flush_least_pages: int
    flush_thorough_interval_ms: int
    transient_pool_slices: int
    transient_pool_slice_bytes: int
    commit_interval_ms: int
    commit_least_pages: int
    commit_thorough_interval_ms: int
    max_message_bytes: int
    prewrite_window_bytes: int
    snapshot_interval_bytes: int
    scrub_bytes_per_s: int
    scrub_interval_ms: int
    compaction_file_size_bytes: int
    compaction_queue_file_size_bytes: int
    compaction_interval_ms: int
    message_delay_level: str
    timer_wheel_enabled: bool
    timer_max_delay_s: int
    timer_congest_num_each_slot: int
    timer_log_file_size_bytes: int
    os_page_cache_busy_timeout_ms: int
    allocate_timeout_ms: int
    clean_resource_interval_ms: int
    delete_when: str
    disk_max_used_space_ratio: int
    disk_space_clean_forcibly_ratio: int
    disk_space_warning_level_ratio: int
    clean_file_forcibly: bool
    delete_file_batch_max: int
    warm_mapped_file: bool
    recycle_commit_log_files: bool
    delete_files_interval_ms: int
    producer_entries_max: int
    group_expiry_hours: float


#: options of a store that are arguments of `start`, and flags of `raymq start`
KEYWORDS = (
    "flush",
    "transient_pool",
    "file_reserved_hours",
    "producer_expiry_hours",
    "catch_up_bytes_per_s",
    "segment_size_bytes",
)
#: the options of a cluster that `config` takes
TAKEN = {name: each for name, each in IN_CLUSTER.items() if name not in KEYWORDS}

_SWITCH = {"true": True, "on": True, "false": False, "off": False}


def check_config(config: object) -> dict[str, Any]:
    """The options that a caller of `start` gave as `config`, each with a value that a store takes.

    Raises: Rejected naming the option, its range and what was found; for a name that is none also the nearest one.
    """
    return _checked(config, TAKEN)


def check_running(config: object) -> dict[str, Any]:
    """The options that a caller of `set_config` gave. Raises: Rejected, as `check_config`; also for none."""
    found = _checked(config, WHILE_RUNNING)
    if not found:
        message = (
            "config is empty; give an option and its value, such as {'flush_interval_ms': 200}"
        )
        raise Rejected(message, field="config", limit="at least 1 option", found=0)
    return found


def _checked(config: object, options: Mapping[str, Option]) -> dict[str, Any]:
    if not isinstance(config, Mapping):
        raise Rejected(
            f"config is {config!r}; give a dict of options, such as {{'flush_interval_ms': 200}}",
            field="config",
            limit="dict",
            found=type(config).__name__,
        )
    for name, value in config.items():
        check_in_cluster(find(name, options), value)
    return dict(config)


def parse_config(texts: Iterable[str], options: Mapping[str, Option] = TAKEN) -> dict[str, Any]:
    """The options of texts such as "flush_interval_ms=200".

    Args: `options`: those that may be named; default: of `start`. Raises: Rejected, as `check_config`.
    """
    found: dict[str, Any] = {}
    for text in texts:
        name, given, value = text.partition("=")
        if not given:
            raise Rejected(
                f"config is {text!r}; write NAME=VALUE, such as flush_interval_ms=200",
                field="config",
                limit="NAME=VALUE",
                found=text,
            )
        parsed = parse_value(find(name, options), value)
        if found.setdefault(name, parsed) != parsed:
            message = f"{name} is given twice, as {found[name]!r} and {parsed!r}; give one value"
            raise Rejected(message, field=name, limit="1 value", found=2)
    return _checked(found, options)


def parse_value(option: Option, text: str) -> Any:
    """The value that a text says. Another text stays as it is, and the check of the option refuses it."""
    try:
        if option.kind == "int":
            return int(text)
        if option.kind == "float":
            return float(text)
    except ValueError:
        return text
    return _SWITCH.get(text.lower(), text) if option.kind == "bool" else text


def find(name: object, options: Mapping[str, Option]) -> Option:
    """The option of this name. Raises: Rejected saying what the name is, or the nearest one."""
    found = options.get(name) if isinstance(name, str) else None
    if found is None:
        raise Rejected(
            f"config has no option {name!r}: {_advice(str(name), options)}",
            field="config",
            limit="an option of docs/reference/configuration.md",
            found=name,
        )
    return found


def _advice(name: str, options: Mapping[str, Option]) -> str:
    """What to do in place of an option that is not among these."""
    if options is WHILE_RUNNING and name in IN_CLUSTER:
        return _advice_of_start(IN_CLUSTER[name])
    if name in KEYWORDS:
        return f"give it as {name}=... of `start`, or --{name.replace('_', '-')}"
    if name in OPTIONS:
        return f"a cluster does not take it. {_sentence(OPTIONS[name].not_in_cluster)}"

    for each in OPTIONS.values():
        if name in each.rocketmq.split(", "):
            return f"RocketMQ's {name} is {each.name} here"
    if name in NOT_TAKEN:
        return f"RayMQ does not have RocketMQ's {name}. {_sentence(NOT_TAKEN[name])}"

    near = difflib.get_close_matches(name, [*options, *KEYWORDS, *IN_CLUSTER], n=1)
    if near:
        return f"did you mean {near[0]}?"
    return "docs/reference/configuration.md has all options"


def _advice_of_start(option: Option) -> str:
    """How an option is changed that does not change while the cluster runs."""
    if option.changes == "first start":
        return "the first start of a cluster decides it"
    flag = f"--{option.name.replace('_', '-')}" if option.name in KEYWORDS else "--config"
    return f"it does not change while the cluster runs. Stop it, and start it with {flag}"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
