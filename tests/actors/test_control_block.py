"""The fields of the control block: packed, fenced, never torn."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from raymq.actors.shared.control_block import (
    FILE_BYTES,
    ROLES,
    SATELLITE_OPTIONS,
    ControlBlock,
    Registration,
    State,
    next_tag,
    pack_field,
    unpack_field,
    value_of,
)
from raymq.actors.shared.processes import ProcessIdentity
from raymq.actors.shared.ring import map_shared
from raymq.store.base.errors import Bug
from raymq.store.base.files import Files
from raymq.store.config.store_config import WHILE_RUNNING
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[2]
ME = Registration(77, ProcessIdentity(4242, 99))
BOOT = 12345


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "control")


@pytest.fixture
def control(path: str) -> Iterator[ControlBlock]:
    block = ControlBlock.open(path, files=Files())
    block.format(BOOT)
    yield block
    block.close()


@pytest.mark.parametrize("tag", [1, 2, 0x7FFF])
@pytest.mark.parametrize("value", [0, 1, 2**48 - 1])
def test_tag_and_value_share_a_field(tag: int, value: int):
    assert unpack_field(pack_field(tag, value)) == (tag, value)
    assert pack_field(tag, value) < 2**63


@pytest.mark.parametrize("value", [-1, 2**48])
def test_a_value_that_does_not_fit_is_a_bug(value: int):
    with pytest.raises(Bug):
        pack_field(1, value)


def test_a_field_with_another_tag_reads_as_0():
    word = pack_field(5, 1000)
    assert value_of(word, 5) == 1000
    assert value_of(word, 4) == 0
    assert value_of(word, 6) == 0


def test_a_zeroed_field_says_nothing():
    assert value_of(0, 0) == 0
    assert value_of(pack_field(0, 7), 0) == 0


def test_tags_go_around_without_0():
    assert next_tag(0) == 1
    assert next_tag(0x7FFE) == 0x7FFF
    assert next_tag(0x7FFF) == 1


def test_a_new_page_is_not_valid(path: str):
    block = ControlBlock.open(path, files=Files())
    assert not block.valid(0)
    assert not block.valid(BOOT)
    assert block.state == State.NEW
    assert all(record.registration() is None for record in block.roles.values())
    block.close()


def test_a_page_of_another_boot_is_not_valid(control: ControlBlock):
    assert control.valid(BOOT)
    assert not control.valid(BOOT + 1)


def test_two_mappings_see_the_same_fields(control: ControlBlock, path: str):
    other = ControlBlock.open(path, files=Files())
    control.begin(11, ME.process, 500, 1)
    assert other.appended == 500
    assert other.state == State.RUNNING
    assert other.process == ME.process
    control.publish_appended(700)
    assert other.appended == 700
    other.close()


def test_a_new_log_hides_the_appended_end_of_the_old(control: ControlBlock):
    control.begin(11, ME.process, 500, 1)
    tag = control.log_generation
    control.begin(12, ME.process, 300, 1)
    assert control.log_generation == next_tag(tag)
    assert control.appended == 300


def test_a_grant_names_one_incarnation_with_a_new_fencing_token(control: ControlBlock):
    record = control.roles["group_commit"]
    first = record.give_grant(77, 500)
    assert record.grant == (first, 77)
    assert record.base == 500
    record.publish_position(first, 600)
    assert record.position(first) == 600
    record.revoke_grant()
    token, incarnation = record.grant
    assert incarnation == 0
    assert record.position(token) == 0
    assert record.last_granted == 77
    assert record.give_grant(78, 0) not in (first, token)


def test_fields_of_a_dead_satellite_survive_the_registration_of_its_successor(
    control: ControlBlock,
):
    record = control.roles["group_commit"]
    token = record.give_grant(77, 0)
    record.publish_sync_started(token, 900)
    record.publish_position(token, 800)
    record.publish_failure(token, 5)
    record.register(ME, 1)
    assert record.sync_started == (token, 900)
    assert record.position(token) == 800
    assert record.failure == (token, 5)
    record.clear(base=0)
    assert record.sync_started == record.failure == (0, 0)


def test_roles_do_not_share_fields(control: ControlBlock):
    for number, role in enumerate(ROLES, 1):
        control.roles[role].register(Registration(number, ProcessIdentity(number, number)), number)
        control.roles[role].give_grant(number, number)
    for number, role in enumerate(ROLES, 1):
        record = control.roles[role]
        assert record.registration() == Registration(number, ProcessIdentity(number, number))
        assert (record.grant.value, record.base, record.heartbeat_ms) == (number, number, number)


def test_formatting_never_repeats_a_fencing_token(control: ControlBlock):
    record = control.roles["replication"]
    before = record.give_grant(77, 0)
    control.format(BOOT + 1)
    assert record.grant == (next_tag(before), 0)
    assert record.last_granted == 0


# --- torn fields ----------------------------------------------------------------------------------

#: every byte differs between the two, so any mixture is neither
ONE = pack_field(0x2AAA, 0xAAAA_AAAA_AAAA)
OTHER = pack_field(0x5555, 0x5555_5555_5555)

WRITER = """
import struct, sys
from raymq.actors.shared.control_block import FILE_BYTES, ControlBlock
from raymq.actors.shared.ring import map_shared
from raymq.store.base.files import Files
path, how = sys.argv[1:]
stop = map_shared(path, FILE_BYTES, files=Files()).cast("q")
control = ControlBlock.open(path, files=Files())
record = control.roles["group_commit"]
raw = map_shared(path, FILE_BYTES, files=Files())
while not stop[511]:
    for _ in range(1000):
        if how == "word":
            record.publish_position(0x2AAA, 0xAAAAAAAAAAAA)
            record.publish_position(0x5555, 0x555555555555)
        else:
            struct.pack_into("q", raw, 8 * 37, 0x2AAAAAAAAAAAAAAA)
            struct.pack_into("q", raw, 8 * 37, 0x5555555555555555)
"""


class Hammer:
    """A process that writes two values into one field in turns, as fast as it can."""

    def __init__(self, path: str, how: str) -> None:
        self._view = map_shared(path, FILE_BYTES, files=Files())
        self._words = self._view.cast("q")
        self._words[37] = ONE
        self.seen: set[int] = set()
        self.polls = 0
        self._process = subprocess.Popen([sys.executable, "-c", WRITER, path, how], cwd=ROOT)

    def poll(self) -> None:
        # Field 37: the position of group_commit, the first role (layout table of control_block.py).
        words = self._words
        self.seen.update({words[37] for _ in range(20_000)})
        self.polls += 20_000

    @property
    def torn(self) -> set[int]:
        return self.seen - {ONE, OTHER}

    def __enter__(self) -> Hammer:
        return self

    def __exit__(self, *_: object) -> None:
        self._words[511] = 1
        assert self._process.wait(30) == 0
        self._words.release()
        self._view.release()


def test_a_polling_process_never_sees_a_value_that_was_not_written(path: str):
    with Hammer(path, "word") as hammer:
        until(lambda: OTHER in hammer.seen, hammer.poll)
        first = hammer.polls
        until(lambda: hammer.polls >= first + 1_000_000, hammer.poll)
    assert hammer.torn == set()


def test_the_test_for_torn_fields_can_fail(path: str):
    # pack_into zeroes its target before it fills it, which the rule of aligned 8-byte moves forbids.
    with Hammer(path, "struct") as hammer:
        until(lambda: bool(hammer.torn), hammer.poll)


def test_without_a_pool_what_is_appended_is_in_the_files(control: ControlBlock):
    control.begin(7, ME.process, 100, 0)
    control.publish_appended(200)
    assert control.committed == 200


def test_committed_bytes_stay_committed_after_a_revoke_and_a_new_grant(
    control: ControlBlock,
):
    record = control.roles["commit_real_time"]
    record.clear(base=100)
    control.begin(7, ME.process, 100, 0, pooled=True)
    control.publish_appended(500)
    assert control.committed == 100

    token = record.give_grant(1, control.committed)
    record.publish_position(token, 300)
    assert control.committed == 300

    # Its lease is revoked, while it was about to publish more.
    record.revoke_grant()
    assert control.committed == 300
    record.publish_position(token, 350)
    assert control.committed == 350

    # Its successor begins there, and has published nothing yet.
    record.give_grant(2, control.committed)
    assert control.committed == 350

    # A truncation, or another CommitLog.
    record.clear(base=200)
    control.begin(8, ME.process, 200, 0, pooled=True)
    assert control.committed == 200


def test_satellites_see_the_options_that_were_changed_and_no_others(tmp_path: Path) -> None:
    page = ControlBlock.open(str(tmp_path / "control"), files=Files())
    assert page.changed_options() == {}
    page.publish_options({"flush_interval_ms": 200, "flush_least_pages": 0})
    assert page.changed_options() == {"flush_interval_ms": 200, "flush_least_pages": 0}
    version = page.options_version
    page.publish_options({"flush_interval_ms": 200, "flush_least_pages": 0})
    assert page.options_version == version
    page.publish_options({"catch_up_bytes_per_s": 1 << 50})
    assert page.changed_options() == {"catch_up_bytes_per_s": 1 << 50}
    assert page.options_version == version + 1
    page.close()


def test_every_option_of_a_satellite_may_change_and_fits_its_field() -> None:
    for name in SATELLITE_OPTIONS:
        option = WHILE_RUNNING[name]
        assert option.kind in ("int", "bool")
        assert option.kind == "bool" or (option.most is not None and option.most < 1 << 62)
    assert 225 + len(SATELLITE_OPTIONS) <= 384
