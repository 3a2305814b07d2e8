"""Facts that stand in several places say the same in all of them: a change in one place fails here."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import io
import json
import pydoc
import re
from dataclasses import fields
from pathlib import Path
from typing import Any, cast, get_type_hints

import pyarrow as pa
import pytest
from ray.autoscaler._private.constants import AUTOSCALER_METRIC_PORT
from ray.dashboard.consts import DASHBOARD_METRIC_PORT

import raymq
import raymq.errors
from raymq.actors.api.call_arguments import EXPRESSION_CHARS_MAX
from raymq.actors.api.held_fetch import IN_VAIN_MS, LOOKED_MS_MAX, LOOKED_UNITS_MAX
from raymq.actors.ray import actor_classes
from raymq.actors.shared import control_block, latency
from raymq.actors.shared.control_block import ROLES
from raymq.actors.shared.processes import ProcessHandle
from raymq.actors.supervise.lease import Candidate
from raymq.actors.supervise.supervisor import Supervisor
from raymq.client.handle import STATUS_TIMEOUT_S
from raymq.client.messages.codecs import _CODECS, CONTENT_TYPE, codec
from raymq.client.messages.fields import FIELDS
from raymq.client.messages.message import Message
from raymq.client.messages.received import ReceivedMessage
from raymq.client.produce.message_encoder import MessageEncoder
from raymq.client.produce.producer_config import ProducerConfig
from raymq.cluster.cli.console import EXIT_OK, EXIT_UNAVAILABLE, Console, exit_code
from raymq.cluster.cli.doctor import _FILES_LOW, _FILES_WARN
from raymq.cluster.cli.grammar import commands_of_grammar
from raymq.cluster.cli.message_commands import print_message
from raymq.cluster.cli.put_back import _FIELDS, of_line
from raymq.cluster.cli.status_text import _SERVICES
from raymq.cluster.deploy import owned_ray, ray_release
from raymq.cluster.deploy.actor_set import specs
from raymq.cluster.deploy.actor_states import CLOSING_RANK, DOOR_ROLES
from raymq.cluster.record.cluster_record import ROCKETMQ_PORT, ClusterRecord
from raymq.cluster.record.paths import ClusterPaths
from raymq.replication import wire
from raymq.spark.format_lookup import OLDEST_PYSPARK
from raymq.store.base import errors
from raymq.store.base.clock import Clock
from raymq.store.base.files import Files
from raymq.store.base.format import PROPERTIES_MAX_BYTES
from raymq.store.config.store_config import WHILE_RUNNING, StoreConfig
from raymq.store.log.commit_real_time import CommitRealTime
from raymq.store.log.flush import PAGE_BYTES, FlushRealTime
from raymq.store.queues.queue_files import OPEN_FILES_MAX
from raymq.store.queues.sql_syntax import DEPTH_MAX
from raymq.store.state import features

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20


def text_of(document: str) -> str:
    """A document with each run of white space as one space."""
    return " ".join((ROOT / document).read_text(encoding="utf-8").split())


def table_keys(document: str, heading: str) -> list[str]:
    """The first code name of each row of the first table after a heading."""
    text = (ROOT / document).read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2]
    rows = text.partition("\n|---")[2].partition("\n\n")[0]
    return re.findall(r"^\| `(\w+)", rows, re.MULTILINE)


def options_of(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self"}


# --- the fields of a message ----------------------------------------------------------------------

#: what a send takes beside the fields of a message
SEND_OPTIONS = {"queue_id", "acks"}
#: a reader gets a delayed message after its delivery, without the time
NOT_READ = {each.name for each in FIELDS if each.is_sent and not each.is_read}
#: facts of a stored message that `raymq consume` leaves out. The body of a null value is printed as null
NOT_PRINTED = {"shard", "is_null"}


#: a message that is sent again has a new sender
NOT_PUT_BACK = {"born_host"}


def test_a_reader_does_not_get_what_was_for_the_shard_alone() -> None:
    assert {"deliver_at_ms", "delay_level", "wait_store_ok"} == NOT_READ


def message_fields() -> set[str]:
    return {each.name for each in fields(Message)}


@pytest.mark.parametrize(
    "send",
    [raymq.Producer.send, raymq.AsyncProducer.send, MessageEncoder.encode],
    ids=lambda function: function.__qualname__,
)
def test_a_send_takes_the_fields_of_a_message(send: Any) -> None:
    assert options_of(send) == message_fields() | SEND_OPTIONS


def received_message() -> ReceivedMessage:
    values = {name: name for name in get_type_hints(ReceivedMessage)}
    given: dict[str, Any] = {
        **values,
        "body": b"body",
        "key": b"key",
        "index_keys": ("one", "two"),
        "properties": {"name": "value"},
        "queue_id": 3,
        "flag": -7,
        "sys_flag": 0x301,
        "deliver_at_ms": None,
        "delay_level": 0,
        "wait_store_ok": True,
        "is_null": False,
    }
    return ReceivedMessage(**given)


def consumed_line(message: ReceivedMessage) -> bytes:
    """The line of `raymq consume -o json`."""
    stdout = io.BytesIO()
    print_message(message, "json", Console(stdout=stdout))
    return stdout.getvalue()


def test_consume_prints_the_fields_of_a_message_and_where_it_is() -> None:
    stored = {each.name for each in fields(ReceivedMessage)}
    assert set(json.loads(consumed_line(received_message()))) == stored - NOT_READ - NOT_PRINTED


def test_produce_accepts_the_fields_of_a_message_and_all_that_consume_prints() -> None:
    accepted = {*_FIELDS, "body", "body_base64"} - {"key_base64", "body_base64"}
    assert accepted == set(json.loads(consumed_line(received_message()))) | message_fields()


def test_produce_puts_back_every_field_that_consume_prints() -> None:
    message = received_message()
    back = of_line(consumed_line(message), 1)
    assert back is not None
    found = {"topic": back.topic, **back.fields}
    assert found == {
        name: getattr(message, name) for name in message_fields() - NOT_READ - NOT_PUT_BACK
    }
    assert back.queue_id == message.queue_id
    later = of_line(b'{"topic": "t", "body": "b", "deliver_at_ms": 7}', 1)
    assert later is not None
    assert later.fields["deliver_at_ms"] == 7


# --- errors ---------------------------------------------------------------------------------------


def test_each_level_of_features_has_its_own_version_of_frames() -> None:
    # A follower ignores records of kinds that it does not know. So it must not follow a leader of another level.
    numbers = features.KNOWN_LEVEL, wire.VERSION
    assert numbers == (4, 7), "a new level needs a new VERSION of frames: raise both, also here"


def test_the_public_errors_are_those_that_cross_the_wire() -> None:
    assert set(raymq.errors.__all__) == set(errors._KINDS)
    for name, kind in errors._KINDS.items():
        assert getattr(raymq.errors, name) is kind


def test_the_reference_has_every_error() -> None:
    text = text_of("docs/reference/errors.md")
    members = re.findall(r"members: \[([\w, ]+)\]", text)
    assert [name.split(", ") for name in members] == [list(errors._KINDS)]


def test_the_page_of_the_promise_has_a_row_for_each_error() -> None:
    rows = table_keys("docs/concepts/promise.md", "The errors, by what to do")
    assert sorted([*rows, "RayMQError"]) == sorted(errors._KINDS)


@pytest.mark.parametrize("name", sorted(errors._KINDS))
def test_a_command_exits_3_exactly_for_an_error_that_may_pass(name: str) -> None:
    error = errors._KINDS[name]("text")
    assert (exit_code(error) == EXIT_UNAVAILABLE) is error.retriable
    assert EXIT_UNAVAILABLE == 3
    assert exit_code(error) != EXIT_OK


# --- codecs ---------------------------------------------------------------------------------------

VALUES: dict[str, Any] = {
    "bytes": b"\x00\xff",
    "json": {"list": [1, "ü", None]},
    "msgpack": {"list": [1, b"\xff"]},
    "arrow-ipc": pa.table({"column": [1, 2]}),
}


@pytest.mark.parametrize("name", sorted(_CODECS))
def test_a_message_of_each_codec_has_the_value_that_was_sent(name: str) -> None:
    if name == "msgpack":
        pytest.importorskip("msgpack")
    encoder = MessageEncoder(ProducerConfig(codec=name), Clock())
    sent = encoder.encode("t", VALUES[name])
    properties = {} if name == "bytes" else {CONTENT_TYPE: name}
    assert codec(name).name == name
    assert Message(topic="t", body=sent.body, properties=properties).value == VALUES[name]
    assert (name.encode() in (sent.properties or b"")) is (name != "bytes")


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(inspect.getdoc(raymq.Producer) or "", id="Producer"),
        pytest.param(inspect.getdoc(raymq.AsyncProducer) or "", id="AsyncProducer"),
        pytest.param(inspect.getdoc(raymq.Queue) or "", id="Queue"),
        pytest.param(text_of("docs/concepts/messages.md"), id="messages.md"),
        pytest.param(text_of("docs/reference/configuration.md"), id="configuration.md"),
    ],
)
def test_a_text_that_lists_the_codecs_has_all_of_them(text: str) -> None:
    listed = re.findall(r"[\"`]([\w-]+)[\"`]", text)
    assert set(_CODECS) <= set(listed)


# --- operations -----------------------------------------------------------------------------------

#: method of `Cluster` -> the function that does it
OPERATIONS = {
    "add_column": "raymq.client.topics.add_column:add_column",
    "add_queues": "raymq.client.topics.add_queues:add_queues",
    "config": "raymq.cluster.operations.set_config:config",
    "set_config": "raymq.cluster.operations.set_config:set_config",
    "create_topic": "raymq.client.topics.new_topic:create_topic",
    "add_shards": "raymq.cluster.operations.add_shards:add_shards",
    "drain_node": "raymq.cluster.operations.drain_node:drain_node",
    "plan_recovery": "raymq.cluster.operations.recover_shard:find_plan",
    "recover_shard": "raymq.cluster.operations.recover_shard:recover_shard",
    "replace_replica": "raymq.cluster.operations.replace_replica:replace_replica",
    "rolling_restart": "raymq.cluster.operations.rolling_restart:rolling_restart",
    "set_replicas": "raymq.cluster.operations.set_replicas:set_replicas",
}


@pytest.mark.parametrize("method", OPERATIONS)
def test_the_promise_of_an_operation_is_in_the_docstring_of_its_method_alone(method: str) -> None:
    function = pydoc.locate(OPERATIONS[method].replace(":", "."))
    text = inspect.getdoc(function) or ""
    assert f"`Cluster.{method}`" in text
    assert not re.search("^(?:Args|Returns|Raises):", text, re.MULTILINE)

    promised = inspect.signature(getattr(raymq.Cluster, method)).parameters
    taken = inspect.signature(cast("Any", function)).parameters
    for name in promised.keys() & taken.keys():
        if taken[name].default is not inspect.Parameter.empty:
            assert taken[name].default == promised[name].default, name


def test_an_option_of_the_command_line_has_the_default_of_its_operation() -> None:
    compared = set()
    for command in commands_of_grammar():
        if command.text.startswith("= "):
            method = command.text.removeprefix("= ")
            parameters = inspect.signature(getattr(raymq.Cluster, method)).parameters
            for names, given in command.options:
                name = given.get("dest", names[-1].lstrip("-").replace("-", "_"))
                if "default" in given and name in parameters and given["default"]:
                    assert given["default"] == parameters[name].default, (method, name)
                    compared.add((method, name))
    assert {("add_shards", "count"), ("rolling_restart", "replica_timeout_s")} <= compared


# --- numbers --------------------------------------------------------------------------------------

STORE = StoreConfig()
PRODUCER = ProducerConfig()
FLUSH_S = f"{STORE.flush_interval_ms / 1000:g} s"
THOROUGH_S = f"{STORE.flush_thorough_interval_ms / 1000:g} s"
TRICKLE_KIB = f"{STORE.flush_least_pages * PAGE_BYTES // 1024} KiB"
KEPT = f"{STORE.file_reserved_hours:g} hours"
PROMISE = "docs/concepts/promise.md"


@pytest.mark.parametrize(
    ("document", "phrase"),
    [
        (
            "README.md",
            f"the last {FLUSH_S} may be lost; for a trickle under {TRICKLE_KIB}, the last {THOROUGH_S}",
        ),
        (
            PROMISE,
            f"the last {FLUSH_S} may be lost; for a trickle under {TRICKLE_KIB}, the last {THOROUGH_S}",
        ),
        ("benchmarks/modes.py", f"synced within {FLUSH_S}, or {THOROUGH_S} if few"),
        ("README.md", f"Messages are kept for {KEPT}"),
        ("docs/concepts/reading.md", f"Messages are kept for {KEPT}"),
        ("docs/operating.md", f"{KEPT} at least"),
        ("docs/operating/retention.md", f"| `delete_when` | `{STORE.delete_when}` |"),
        (PROMISE, f"usually within {STORE.commit_interval_ms} ms"),
        (PROMISE, f"Bodies over {STORE.max_message_bytes // MIB} MiB"),
        (PROMISE, f"properties over {PROPERTIES_MAX_BYTES:,} bytes"),
        (PROMISE, f"`delivery_timeout_ms` ({PRODUCER.delivery_timeout_ms // 1000} s)"),
        (PROMISE, f"unused for {STORE.producer_expiry_hours / 24:g} days"),
        ("docs/concepts/messages.md", f"up to {STORE.max_message_bytes // MIB} MiB of bytes"),
        ("docs/operating/install.md", f"{_FILES_LOW:,} open files (`ulimit -n`), above 150 GiB"),
        ("docs/operating/install.md", f"of log per shard {_FILES_WARN:,} |"),
        ("docs/operating/install.md", f"{OPEN_FILES_MAX} for all consume queues"),
        ("docs/operating/boot.md", f"LimitNOFILE={_FILES_WARN}"),
        ("cluster/cli/doctor.py", "above 150 GiB of log per shard"),
        ("docs/reference/limits.md", f"{STORE.max_message_bytes // MIB} MiB (`max_message_bytes`)"),
        *(
            (page, f"{EXPRESSION_CHARS_MAX:,} characters, {and_}{DEPTH_MAX} levels of brackets")
            for page, and_ in (("docs/reference/limits.md", ""), ("docs/guides/filters.md", "and "))
        ),
        ("docs/reference/limits.md", f"| {LOOKED_UNITS_MAX:,}, and for {LOOKED_MS_MAX} ms |"),
        ("docs/guides/filters.md", f"{LOOKED_UNITS_MAX:,} messages or for {LOOKED_MS_MAX} ms"),
        ("docs/guides/filters.md", f"ends {IN_VAIN_MS} ms after"),
        (
            "docs/operating/runbook.md",
            f"UNREACHABLE: no answer within {STATUS_TIMEOUT_S:g} seconds",
        ),
        ("cluster/cluster.py", f"A shard without an answer for {STATUS_TIMEOUT_S:g} s"),
    ],
)
def test_a_number_in_a_document_is_the_default(document: str, phrase: str) -> None:
    assert phrase in text_of(document)


@pytest.mark.parametrize(
    ("document", "phrase"),
    [
        ("README.md", "PySpark {} and later"),
        ("CHANGELOG.md", "PySpark {} and later"),
        ("docs/spark.md", "From PySpark {} on"),
        ("docs/spark.md", "older than PySpark {}"),
        ("docs/start.md", "PySpark {} or later"),
        ("docs/reference/limits.md", "PySpark {} or later"),
        ("docs/reference/errors.md", "PySpark {} or later"),
        ("pyproject.toml", "pyspark>={},<5"),
        ("noxfile.py", "pyspark>={},<5"),
    ],
)
def test_the_oldest_pyspark_of_the_format_is_the_same_everywhere(
    document: str, phrase: str
) -> None:
    assert phrase.format(".".join(map(str, OLDEST_PYSPARK))) in text_of(document)


def module_of_ci() -> Any:
    """.ci/pythons.py."""
    spec = importlib.util.spec_from_file_location("pythons", ROOT / ".ci" / "pythons.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pairs_of_ray_and_python_are_the_same_everywhere() -> None:
    pairs = module_of_ci().PAIRS
    releases = [ray_release.release_of(each.ray) or ray_release.OLDEST for each in pairs]
    assert releases[0] == ray_release.OLDEST
    assert releases[-1] == ray_release.NEWEST
    assert releases == sorted(releases)
    install = text_of("docs/operating/install.md")
    for release, pair in zip(releases, pairs, strict=True):
        python = ".".join(map(str, pair.python))
        assert f"| {release} | {python} | {pair.pyarrow or 'newest'} |" in install
    project = text_of("pyproject.toml")
    assert project.count(f">={ray_release.OLDEST},<3") == 5
    assert f"pyarrow>={pairs[0].pyarrow.partition('.')[0]}" in project
    assert f"_PYARROW_MIN = {pairs[0].pyarrow.partition('.')[0]}" in text_of(
        "cluster/cli/doctor.py"
    )


def test_each_extra_is_installed_alone_with_one_pair_and_used() -> None:
    module = module_of_ci()
    section = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = section.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = set(re.findall(r"^(\w+) = \[", section, re.MULTILINE))
    assert {names for pair in module.PAIRS for names in pair.rounds} >= {(each,) for each in extras}
    assert set(module.USES) == {"", *extras}
    # `dev` has `docs`, and `demo` has `spark`, which PySpark 4 excludes.
    for pair in module.PAIRS:
        used = {name for names in pair.rounds for name in names}
        assert extras - used <= {"docs", "spark", "demo"}, pair.name


@pytest.mark.parametrize(
    ("document", "phrase"),
    [
        ("README.md", "Ray {oldest} and later"),
        ("CHANGELOG.md", "Ray {oldest} and later"),
        ("docs/index.md", "Ray {oldest} and later"),
        ("docs/operating/install.md", "Ray {oldest} or newer"),
        ("docs/operating/install.md", "newer Ray than {newest}"),
        ("docs/operating/upgrade.md", "every Ray from {oldest} on"),
        ("docs/reference/limits.md", "Ray from {oldest} on**, tested up to {newest}"),
    ],
)
def test_the_oldest_and_the_newest_ray_are_the_same_everywhere(document: str, phrase: str) -> None:
    wanted = phrase.format(oldest=ray_release.OLDEST, newest=ray_release.NEWEST)
    assert wanted in text_of(document)


def test_a_number_in_a_document_that_is_a_word_is_the_default() -> None:
    assert STORE.producer_entries_max == 1_000_000
    assert "the latest million combinations" in text_of(PROMISE)
    assert STORE.timer_max_delay_s == 3 * 86_400
    assert "more than three days ahead" in text_of(PROMISE)


def test_the_numbers_in_the_text_of_start_are_the_defaults() -> None:
    text = " ".join((inspect.getdoc(raymq.start) or "").split())
    assert f"the last {FLUSH_S}, or {THOROUGH_S} of a trickle" in text
    assert f"{STORE.file_reserved_hours:g} by default" in text
    pool = f"{STORE.transient_pool_slices} x {STORE.transient_pool_slice_bytes // MIB} MiB"
    assert pool in text
    assert ClusterRecord.file_reserved_hours == STORE.file_reserved_hours
    assert f"{STORE.producer_expiry_hours:g} by default" in text
    assert ClusterRecord.producer_expiry_hours == STORE.producer_expiry_hours


@pytest.mark.parametrize(
    ("document", "options"),
    [
        (
            "docs/operating/retention.md",
            """file_reserved_hours disk_max_used_space_ratio disk_space_clean_forcibly_ratio
            disk_space_warning_level_ratio delete_file_batch_max clean_file_forcibly""",
        ),
    ],
)
def test_a_table_of_options_has_the_defaults(document: str, options: str) -> None:
    text = text_of(document)
    for option in options.split():
        assert f"| `{option}` | {getattr(STORE, option)} |" in text


@pytest.mark.parametrize("flusher", [FlushRealTime, CommitRealTime])
def test_a_flusher_has_no_interval_of_its_own(flusher: type) -> None:
    parameters = inspect.signature(flusher).parameters
    assert "config" in parameters
    assert not any(name.endswith(("_ms", "_pages")) for name in parameters)


#: constructors that read an option which may change while the store is open: each is given another value later
FOLLOWED_LATER = {
    ("store/log/commit_log.py", "warm_mapped_file"),
    ("store/engine/message_store.py", "producer_expiry_hours"),
    ("actors/supervise/replica_host.py", "flush_commit_log_timed"),
    ("actors/leader/put_acks.py", "sync_flush_timeout_ms"),
    ("actors/leader/put_acks.py", "slave_timeout_ms"),
    ("actors/satellites/replicator.py", "catch_up_bytes_per_s"),
}


def test_an_option_that_may_change_is_read_where_it_is_used_and_kept_by_no_constructor() -> None:
    read, kept = set(), set()
    for path in [*(ROOT / "store").rglob("*.py"), *(ROOT / "actors").rglob("*.py")]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for function in ast.walk(tree):
            if not isinstance(function, ast.FunctionDef) or function.name == "__post_init__":
                continue
            for node in ast.walk(function):
                if isinstance(node, ast.Attribute) and node.attr in WHILE_RUNNING:
                    read.add(node.attr)
                    if function.name == "__init__":
                        kept.add((path.relative_to(ROOT).as_posix(), node.attr))
    assert read == set(WHILE_RUNNING)
    assert kept == FOLLOWED_LATER


# --- ports ----------------------------------------------------------------------------------------

#: row of security.md -> the options of `ray start` that set its ports
PORTS = {
    "Ray's GCS (`gcs_server`)": {"--port"},
    "Ray's raylet: node manager, object manager": {"--node-manager-port", "--object-manager-port"},
    "each Ray worker, actors of RayMQ and drivers included": {
        "--min-worker-port",
        "--max-worker-port",
    },
    "Ray's runtime env agent, dashboard agent (gRPC, HTTP, metrics)": {
        "--runtime-env-agent-port",
        "--dashboard-agent-grpc-port",
        "--dashboard-agent-listen-port",
        "--metrics-export-port",
    },
    "Ray Client server, if `grpcio` is installed": {"--ray-client-server-port"},
}


def test_the_table_of_ports_has_a_row_for_each_port_that_a_start_opens() -> None:
    ports = [1] * len(owned_ray._PORT_OPTIONS)
    options = {each.partition("=")[0] for each in owned_ray._arguments(Path("t"), ports, 1, True)}
    opened = {option for option in options if option.endswith("-port")}
    assert opened == set().union(*PORTS.values())

    text = (ROOT / "docs/operating/security.md").read_text(encoding="utf-8")
    table = (
        text.partition("\n## Ports and firewall\n")[2].partition("\n|---")[2].partition("\n\n")[0]
    )
    rows = dict(re.findall(r"^\| (.*?) \| (.*?) \|", table, re.MULTILINE))
    autoscaler = "Ray's autoscaler and dashboard: metrics"
    doors = "with `--rocketmq`, the server beside each replica"
    assert set(rows) == {"CommitLog of each replica: Arrow Flight", doors, autoscaler, *PORTS}
    assert str(ROCKETMQ_PORT) in rows[doors]
    assert rows["Ray's raylet: node manager, object manager"] == "two"
    assert rows["Ray's runtime env agent, dashboard agent (gRPC, HTTP, metrics)"] == "four"
    for port in (AUTOSCALER_METRIC_PORT, DASHBOARD_METRIC_PORT):
        assert str(port) in rows[autoscaler]


# --- the roles of satellites ----------------------------------------------------------------------


def test_the_records_of_all_roles_fit_into_the_control_block() -> None:
    roles = len(ROLES)
    words = control_block.FILE_BYTES // 8
    records = control_block._FIRST_ROLE + roles * control_block._ROLE_FIELDS
    latencies = control_block._FIRST_LATENCY + roles * control_block._ROLE_FIELDS
    assert control_block._FIRST_ROLE > control_block._POOLED
    assert control_block._ROLE_FIELDS > control_block._R_BASE
    assert control_block._ROLE_FIELDS >= latency.FIELDS
    assert records <= control_block._FIRST_LATENCY
    assert latencies <= words, "a further role needs a larger page and a new VERSION"


def test_every_role_is_closed_shown_and_explained() -> None:
    processes = {control_block.COMMIT_LOG, *ROLES, *DOOR_ROLES}
    assert set(CLOSING_RANK) == processes
    assert set(_SERVICES) == set(ROLES)
    assert set(table_keys("docs/operating.md", "What runs")) == processes
    design = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    for service in _SERVICES.values():
        assert re.search(rf"^\| {service} ", design, re.MULTILINE), service


def mirrored(flush: str = "sync") -> ClusterRecord:
    """The record of a cluster with a transient pool."""
    return ClusterRecord(
        name="n",
        cluster_id="c" * 32,
        shards=1,
        replicas=2,
        flush=flush,
        segment_size_bytes=MIB,
        ephemeral=True,
        transient_pool=True,
    )


def test_every_role_is_started_in_some_mode() -> None:
    started: set[str] = set()
    for flush in ("sync", "async"):
        record = mirrored(flush)
        started |= {*record.roles(0), *record.roles(1)}
    assert started == {control_block.COMMIT_LOG, *ROLES}


def test_the_table_of_an_actors_spec_has_all_of_its_fields(tmp_path: Path) -> None:
    lines = (actor_classes.__doc__ or "").splitlines()
    rows = [re.split(r" {2,}", line.strip())[0] for line in lines if line.startswith("    ")]
    found = {name for row in rows for name in row.split(", ")}
    for spec in specs(mirrored(), ClusterPaths(tmp_path), "token", {}):
        assert set(spec) == found


class FakeHandle(ProcessHandle):
    """The handle of a process that does not exist."""

    def __init__(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize("role", ROLES)
def test_a_grant_of_every_role_has_a_base(role: str, tmp_path: Path) -> None:
    supervisor = Supervisor(
        tmp_path, [role], clock=Clock(), files=Files(), witness_sync=lambda: 300
    )
    try:
        supervisor.fence_old()
        supervisor.begin(appended=700, synced=300, confirmed=200)
        lease = supervisor._leases[role]
        supervisor._grant(lease, Candidate(5, FakeHandle()), 300)
        assert lease.record.grant.value == 5
        flushed = {"group_commit": 300, "flush_real_time": 300}
        assert lease.record.base == {**flushed, "commit_real_time": 700, "replication": 200}[role]
    finally:
        supervisor.close()
