"""Many keys at once give what each gives alone."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymq.store.base.errors import Rejected
from raymq.store.config.store_config import StoreConfig
from raymq.store.index import index_file, query_keys
from raymq.store.index.index_keys import key_hash
from raymq.store.index.key_search import KeyHits
from raymq.store.put.inner_message import InnerMessage
from raymq.store.records import record
from tests.support.confirming import confirm_with_index
from tests.support.engine import Engine

CONFIG = StoreConfig(
    segment_size_bytes=64 * 1024,
    consume_queue_file_size_bytes=2000,
    max_hash_slot_num=50,
    max_index_num=300,
)
#: "Aa" and "BB" have the same hash
WORDS = [f"k{number}" for number in range(40)] + ["schlüssel", "键", "Aa", "BB"]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory):
    made = Engine(tmp_path_factory.mktemp("keys"), config=CONFIG)
    chance = random.Random(4)
    for number in range(400):
        keys = " ".join(chance.choices(WORDS, k=chance.randrange(3)))
        properties = {"KEYS": keys} if keys else {}
        if number % 3 == 0:
            properties["UNIQ_KEY"] = f"u{number}"
        topic = "t" if number % 7 else "other"
        made.store.put_inner([InnerMessage(topic, 0, b"%d" % number * 40, properties)])
        made.clock.advance(500)
        if number % 50 == 0:
            made.confirm()
    confirm_and_index(made)
    assert len(made.store.index._index_files) > 1
    yield made
    made.store.close()


def confirm_and_index(engine: Engine) -> None:
    engine.confirm()
    while engine.store.reput.index_behind:
        engine.store.dispatch(engine.store.log.confirmed)


def bodies(hits: KeyHits, key: int) -> list[bytes]:
    raws = [hits.records[row].as_py() for row in hits.rows[hits.keys == key].tolist()]
    return [
        record.decode(raw, np.array([0]), np.array([len(raw)])).column("body")[0].as_py()
        for raw in raws
    ]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("max_num", [1, 3, 64])
@pytest.mark.parametrize("span", [(0, 1 << 62), (60_000, 150_000)])
def test_each_key_has_the_messages_that_it_has_alone(
    engine: Engine, exact: bool, max_num: int, span: tuple[int, int]
) -> None:
    start = 1_700_000_000_000
    begin, end = (start + span[0], start + span[1]) if span[0] else span
    keys = [*WORDS, "u0", "u3", "u399", "nothing"]
    options = {"max_num": max_num, "begin_ms": begin, "end_ms": end, "exact": exact}
    hits = engine.store.query.by_keys("t", keys, **options)
    for number, key in enumerate(keys):
        alone = engine.store.query.by_key("t", key, **options).records.column("body").to_pylist()
        assert bodies(hits, number) == alone


@pytest.mark.parametrize("few", [0, 8])
def test_what_only_looks_like_a_hit_counts_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few: int
) -> None:
    monkeypatch.setattr(query_keys, "FEW_KEYS", few)
    made = Engine(tmp_path, config=CONFIG)
    start = made.clock.now_ms()
    # "Aa" and "BB" have the same hash; "d" is twice in the last message, and all are of one second.
    keyed = ("k d", "k d", "Aa", "BB", "BB", "BB", "d")
    for number, keys in enumerate(keyed):
        more = {"UNIQ_KEY": "d"} if number == 6 else {}
        made.store.put_inner([InnerMessage("t", 0, b"%d" % number, {"KEYS": keys, **more})])
        made.clock.advance(10)
    confirm_with_index(made.store)
    for keys, options, want in (
        (["k", "d"], {"max_num": 1, "end_ms": start}, [[b"0"], [b"0"]]),
        (["d", "k"], {"max_num": 2}, [[b"1", b"6"], [b"0", b"1"]]),
        (["Aa", "d", "BB"], {"max_num": 1, "exact": True}, [[b"2"], [b"6"], [b"5"]]),
    ):
        hits = made.store.query.by_keys("t", keys, **options)
        assert [bodies(hits, key) for key in range(len(keys))] == want
        raws = hits.records.to_pylist()
        assert len(set(raws)) == len(raws), "each record once"
    made.store.close()


def test_chains_of_thousands_are_looked_through_as_a_whole(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = engine.store.query.by_keys("t", WORDS, max_num=64, exact=True)
    monkeypatch.setattr(index_file, "CHAIN_STEPS", 3)
    have = engine.store.query.by_keys("t", WORDS, max_num=64, exact=True)
    assert [bodies(have, key) for key in range(9)] == [bodies(want, key) for key in range(9)]


def test_no_key_and_no_hit_are_empty(engine: Engine) -> None:
    for keys in ([], ["nothing"]):
        hits = engine.store.query.by_keys("t", keys, max_num=5)
        assert (len(hits.keys), len(hits.rows), len(hits.records)) == (0, 0, 0)


@pytest.mark.parametrize(
    ("topic", "keys", "max_num", "field"),
    [
        ("t", ["a", ""], 1, "key"),
        ("t", ["\x02"], 1, "key"),
        ("", ["a"], 1, "topic"),
        ("t", [], 0, "max_num"),
    ],
)
def test_a_query_that_is_none_is_refused(
    engine: Engine, topic: str, keys: list[str], max_num: int, field: str
) -> None:
    with pytest.raises(Rejected) as refused:
        engine.store.query.by_keys(topic, keys, max_num=max_num)
    assert refused.value.field == field


Hits = list[tuple[int, int]]


def found(engine: Engine, few: int, keys: list[str], options: dict[str, Any]) -> Hits:
    """Hits as pairs of a key's row and a physical offset."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(query_keys, "FEW_KEYS", few)
        hits = engine.store.query.by_keys("t", keys, **options)
    hits.records.validate(full=True)
    places = [int.from_bytes(raw[28:36], "big") for raw in hits.records.to_pylist()]
    assert places == sorted(set(places))
    return sorted((key, places[row]) for key, row in zip(*map(list, hits[:2]), strict=True))


def found_all_ways(engine: Engine, keys: list[str], options: dict[str, Any]) -> Hits:
    """Each key alone, few keys and many keys: all of them find the same."""
    alone = [
        (row, place)
        for row, key in enumerate(keys)
        for _, place in found(engine, 8, [key], options)
    ]
    # One more, for a key alone has no other way.
    for few in (0, 8):
        assert found(engine, few, [*keys, "nothing"], options) == alone
    return alone


@given(
    keys=st.lists(st.sampled_from([*WORDS, "u0", "u399", "nothing"]), max_size=7, unique=True),
    max_num=st.integers(1, 70),
    span=st.tuples(st.integers(-1, 210_000), st.integers(-1, 210_000)).map(sorted),
    exact=st.booleans(),
    steps=st.sampled_from([3, index_file.CHAIN_STEPS]),
)
@settings(max_examples=60)
def test_a_key_alone_and_few_keys_find_what_chains_in_step_find(
    engine, keys, max_num, span, exact, steps
):
    begin, end = (engine.clock.now_ms() - 200_000 + at for at in span)
    options = {"max_num": max_num, "begin_ms": begin, "end_ms": end, "exact": exact}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_file, "CHAIN_STEPS", steps)
        found_all_ways(engine, keys, options)


def test_entries_of_deleted_files_and_of_nothing_that_is_confirmed_are_passed_over(tmp_path):
    made = Engine(tmp_path, config=replace(CONFIG, segment_size_bytes=16 * 1024))
    log, now = made.store.log, made.clock.now_ms()
    while len(log.segments.files) < 3:
        made.store.put_inner([InnerMessage("t", 0, b"x" * 100, {"KEYS": "k"})])
        confirm_with_index(made.store)
    everything = found_all_ways(made, ["k"], {"max_num": 64})
    last = everything[-1][1]
    (above,) = made.store.put_inner([InnerMessage("t", 0, b"not confirmed", {"KEYS": "k"})])
    # The entries that a cut by RocketMQ leaves: inside a record, at the end of a file, after the log's end.
    places = [-9, last + 4, 2 * 16 * 1024 - 1, above.physical_offset, log.end, log.end + 999]
    hashes = np.full(len(places), key_hash("t", "k"), np.int32)
    made.store.index.append(hashes, np.array(places), np.full(len(places), now), upto=log.confirmed)
    assert found_all_ways(made, ["k"], {"max_num": 64}) == everything
    files = log.segments.files
    log.segments.files = files[-1:]
    kept = [hit for hit in everything if hit[1] >= log.start]
    assert 0 < len(kept) < len(everything)
    assert found_all_ways(made, ["k"], {"max_num": 64}) == kept
    log.segments.files = files
    made.store.close()


def test_messages_of_all_sizes_are_found_one_key_after_the_other(engine_of_sizes: Engine) -> None:
    # How many bytes are read for each record follows the query before.
    find = engine_of_sizes.store.query.by_key
    for key in ("small", "large", "small", "all", "huge", "all", "small", "large"):
        expected = [size for name, size in SIZES if key in (name, "all")]
        assert [len(body) for body in find("t", key).records.column("body").to_pylist()] == expected


SIZES = [("small", 10), ("large", 3000), ("huge", 20_000), ("small", 0), ("large", 7000)] * 3


@pytest.fixture
def engine_of_sizes(tmp_path):
    made = Engine(tmp_path, config=CONFIG)
    for name, size in SIZES:
        made.store.put_inner([InnerMessage("t", 0, bytes(size), {"KEYS": f"{name} all"})])
    confirm_and_index(made)
    yield made
    made.store.close()
