"""Many keys at once give what each gives alone."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from raymq.store import record
from raymq.store.config import StoreConfig
from raymq.store.errors import Rejected
from raymq.store.index import index_file, query_keys
from raymq.store.index.query_keys import KeyHits
from raymq.store.put.inner_message import InnerMessage
from tests.support.confirming import confirm_with_index
from tests.support.engine import Engine

CONFIG = StoreConfig(
    segment_size_bytes=64 * 1024,
    consume_queue_file_size_bytes=2000,
    max_hash_slot_num=50,
    max_index_num=300,
)
WORDS = [f"k{number}" for number in range(40)] + ["schlüssel", "键"]


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
    made.confirm()
    while made.store.index_behind:
        made.store.dispatch(made.store.log.confirmed)
    assert len(made.store.index._files) > 1
    yield made
    made.store.close()


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
    hits = engine.store.query_messages("t", keys, **options)
    for number, key in enumerate(keys):
        alone = engine.store.query_message("t", key, **options).records.column("body").to_pylist()
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
        hits = made.store.query_messages("t", keys, **options)
        assert [bodies(hits, key) for key in range(len(keys))] == want
        raws = hits.records.to_pylist()
        assert len(set(raws)) == len(raws), "each record once"
    made.store.close()


def test_chains_of_thousands_are_looked_through_as_a_whole(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = engine.store.query_messages("t", WORDS, max_num=64, exact=True)
    monkeypatch.setattr(index_file, "CHAIN_STEPS", 3)
    have = engine.store.query_messages("t", WORDS, max_num=64, exact=True)
    assert [bodies(have, key) for key in range(9)] == [bodies(want, key) for key in range(9)]


def test_no_key_and_no_hit_are_empty(engine: Engine) -> None:
    for keys in ([], ["nothing"]):
        hits = engine.store.query_messages("t", keys, max_num=5)
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
        engine.store.query_messages(topic, keys, max_num=max_num)
    assert refused.value.field == field


@pytest.mark.parametrize("max_num", [1, 5, 64])
def test_few_keys_looked_up_one_by_one_find_what_chains_in_step_find(engine, monkeypatch, max_num):
    found = []
    for few in (0, 8):
        monkeypatch.setattr(query_keys, "FEW_KEYS", few)
        hits = engine.store.query_messages("t", [*WORDS[:5], "nothing"], max_num=max_num)
        found.append([bodies(hits, key) for key in range(6)])
    assert found[0] == found[1]
    assert found[0][0]
    assert found[0][5] == []
