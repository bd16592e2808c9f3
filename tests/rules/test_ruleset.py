"""The rule set and its directory: round trip, table, prices, vocabulary, what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.merged_models import fresh_model
from support.ngram_oracle import filtered
from support.tiny_models import word_tokenizer
from umim_core.backbone.backbone import Backbone
from umim_core.backbone.tokenizer_files import tokenizer_fingerprint
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.config.rule_options import RuleOptions
from umim_core.embedded.assets import embedded_path
from umim_core.errors import ArtifactError, RuleSetError, TokenizerMismatchError, UmimError
from umim_core.mining.counting import count_ngrams
from umim_core.rules.grams import NgramCounts
from umim_core.rules.ruleset import RULES_SCHEMA, TABLE_SCHEMA, RuleOrigin, RuleSet
from umim_core.store.artifacts import read_json, write_manifest
from umim_core.text.token_ids import MAX_TOKEN_ID


def counted(tau: int, longest: int = 4) -> NgramCounts:
    stream = np.random.default_rng(3).geometric(0.15, 6000) % 50
    if longest > 4:
        stream[5000:5900] = np.tile(stream[:30], 30)
    return count_ngrams(stream, np.array([0, 6000], dtype=np.int64), tau, longest=longest)


def mined(tau: int = 2, longest: int = 4, **origin: object) -> RuleSet:
    options = RuleOptions(tau=tau, longest=longest, segment_length=6000)
    return RuleSet.from_counts(counted(tau, longest), RuleOrigin(options=options, **origin))


ROUND_TRIPS: dict[str, Callable[[], RuleSet]] = {
    **{f"up to {n}": partial(mined, longest=n, corpus_digest="c" * 64) for n in (4, 6, 16)},
    "documents": lambda: filtered(counted(3), min_documents=4, protect=("digits",)),
    "confidence": lambda: filtered(counted(3), source="confidence", min_probability=0.7),
    "none": lambda: RuleSet.from_spans([]),
}


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_round_trip_keeps_rules_counts_origin_and_digest(tmp_path: Path, name: str) -> None:
    rules = ROUND_TRIPS[name]()
    rules.save(tmp_path / "rules")
    back = RuleSet.load(tmp_path / "rules")
    assert (back.digest, back.counts_by_order) == (rules.digest, rules.counts_by_order)
    assert (back.origin, back.infix_free) == (rules.origin, rules.infix_free)
    assert (name == "none") != bool(len(rules.ids_by_order[rules.longest]))
    for n in rules.orders:
        assert np.array_equal(back.ids_by_order[n], rules.ids_by_order[n])
        assert np.array_equal(back.support_by_order[n], rules.support_by_order[n])


@pytest.mark.parametrize(
    ("name", "digest"),
    [("umim-docs-gpt2-adapted", "24c4f07f4109"), ("umim-smollm2-135m-adapters", "c30b26f0b40b")],
)
def test_shipped_rules_keep_their_digest(name: str, digest: str) -> None:
    place = embedded_path(name, "checkpoint")
    assert place is not None and RuleSet.load(place / "rules").digest.startswith(digest)


def test_how_long_rules_may_be_is_kept_where_none_is_and_counts_for_the_digest(
    tmp_path: Path,
) -> None:
    rules = RuleSet.from_spans([(1, 2), (1, 2, 3), (7,) * 16])
    short = rules.take(rules.sizes < 16)
    short.save(tmp_path / "rules")
    recorded = read_json(tmp_path / "rules" / "manifest.json")
    assert recorded["rules"] == {str(n): count for n, count in short.counts_by_order.items()}
    back = RuleSet.load(tmp_path / "rules")
    assert (back.longest, back.digest) == (16, short.digest)
    assert back.digest != RuleSet.from_spans([(1, 2), (1, 2, 3)]).digest
    for odd in (3, 17, 10**9, "16", True):
        body = short.origin.record() | {"longest": odd}
        write_manifest(tmp_path / "rules", kind="rules", schema=RULES_SCHEMA, body=body)
        with pytest.raises(RuleSetError, match=f"must describe its rules; got longest {odd}"):
            RuleSet.load(tmp_path / "rules")


@pytest.mark.parametrize("orders", [(), (2, 3), (2, 3, 4, 6), range(2, 18), (4, 3, 2)])
def test_orders_that_no_rule_set_has_are_refused(orders: Sequence[int]) -> None:
    ids = {n: np.zeros((0, n), np.int32) for n in orders}
    with pytest.raises(RuleSetError, match=r"must lie in 4\.\.16|must have all orders"):
        RuleSet(ids, {n: np.zeros(0, np.int64) for n in orders})


def test_two_saves_are_byte_equal_of_stable_columns_sorted_by_order_and_ids(
    tmp_path: Path,
) -> None:
    for name in ("rules", "again"):
        mined().save(tmp_path / name)
    files = sorted(path.name for path in (tmp_path / "rules").rglob("*"))
    assert files == ["manifest.json", "rules.parquet"]
    first, second = (
        [(tmp_path / name / x).read_bytes() for x in files] for name in ("rules", "again")
    )
    assert first == second
    table = pq.read_table(tmp_path / "rules" / "rules.parquet")
    assert [(field.name, str(field.type)) for field in table.schema] == [
        ("n", "int8"),
        ("ids", "list<element: int32>"),
        ("count", "int64"),
    ]
    rows = list(zip(table["n"].to_pylist(), table["ids"].to_pylist(), strict=True))
    assert rows == sorted(rows)
    assert len(rows) == len(mined())


def test_rules_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    own, other = (
        tokenizer_fingerprint(word_tokenizer(words))
        for words in (["<eos>", "cat", "dog"], ["<eos>", "dog", "cat"])
    )
    mined(tokenizer_fingerprint=own).save(tmp_path / "rules")
    assert len(RuleSet.load(tmp_path / "rules", tokenizer_fingerprint=own))
    with pytest.raises(TokenizerMismatchError, match=f"tokenizer {own[:12]}; got {other[:12]}"):
        RuleSet.load(tmp_path / "rules", tokenizer_fingerprint=other)
    mined().save(tmp_path / "of any")
    assert RuleSet.load(tmp_path / "of any", tokenizer_fingerprint=own).options.tau == 2


@pytest.mark.parametrize(
    ("span", "message"),
    [
        ((1,), "2 to 16 tokens"),
        ((1,) * 17, "2 to 16 tokens"),
        *(
            (span, "2 to 16 tokens, whole numbers in a tuple")
            for span in ((1.5, 2), "ab", [1, 2], 5)
        ),
        ((-1, 2), r"lie in 0\.\.262143; got \(-1, 2\)"),
        ((1, 2, 1 << 40), r"lie in 0\.\.262143"),
    ],
)
def test_spans_that_cannot_be_rules_are_refused(span: Any, message: str) -> None:
    with pytest.raises(RuleSetError, match=message):
        RuleSet.from_spans([(1, 2), span])


def test_a_higher_threshold_equals_counting_again_and_a_lower_one_is_refused() -> None:
    later = filtered(counted(2), tau=10, segment_length=6000)
    assert later.digest == mined(tau=10).digest
    assert 0 < len(later) < len(mined())
    with pytest.raises(RuleSetError, match=r"tau must be at least 3, .*; got 2"):
        filtered(counted(3), tau=2)


def test_the_digest_tells_rules_counts_and_origin_apart() -> None:
    base = RuleSet.from_spans([(1, 2)])
    others = [
        RuleSet.from_spans([(1, 3)]),
        RuleSet.from_spans([(1, 2)], tokenizer_fingerprint="a"),
        RuleSet(base.ids_by_order, {**base.support_by_order, 2: np.array([2])}),
        *(
            RuleSet(base.ids_by_order, base.support_by_order, base.origin.with_options(changes))
            for changes in (
                *({"overlap": "greedy"}, {"source": "frequency"}, {"segment_length": 9}),
                {"min_documents": 2},
            )
        ),
    ]
    assert base.digest == RuleSet.from_spans([(1, 2)]).digest
    assert len({base.digest, *(other.digest for other in others)}) == 1 + len(others)


SPANS = [(1, 2), (3, 4), (1, 2, 3), (5, 6, 7, 8)]
PRICES = np.array([0.5, 0.0, 1.25, 0.1], np.float32)


@pytest.fixture
def rules() -> RuleSet:
    return RuleSet.from_spans(SPANS).with_prices(PRICES)


def test_the_same_rules_share_their_tables(rules: RuleSet) -> None:
    tables = rules.tables
    everything = rules.take(np.ones(len(rules), dtype=np.bool_))
    other = rules.with_origin(RuleOrigin(tokenizer_fingerprint="other"))
    assert all(same.tables is tables for same in (everything, other, other.with_prices(None)))
    assert other.digest != rules.digest
    fewer = rules.take(np.array([True, True, True, False]))
    assert fewer.tables is not tables


def test_prices_come_back_with_their_rules_and_leave_the_digest(
    rules: RuleSet, tmp_path: Path
) -> None:
    rules.save(tmp_path / "rules")
    back = RuleSet.load(tmp_path / "rules")
    assert back.require_prices().dtype == np.float32
    assert np.array_equal(back.require_prices(), PRICES)
    bare = RuleSet.from_spans(SPANS)
    assert back.digest == rules.digest == bare.digest
    with pytest.raises(RuleSetError, match=r"4 rules without prices\. Measure them: umim prune"):
        bare.require_prices()


@pytest.mark.parametrize(
    ("prices", "found"),
    [
        (PRICES[:3], r"float32 \(3,\)"),
        (PRICES.astype(np.float64), r"float64 \(4,\)"),
        (np.array([0, 0, np.nan, 0], np.float32), "not finite"),
    ],
)
def test_what_is_no_price_of_every_rule_is_refused(prices: np.ndarray, found: str) -> None:
    with pytest.raises(RuleSetError, match=f"must be 4 finite float32 numbers.*{found}"):
        RuleSet.from_spans(SPANS).with_prices(prices)


def test_an_id_beyond_the_vocabulary_and_a_special_token_are_refused() -> None:
    RuleSet.from_spans([(1, 31)]).check_vocabulary(32, (0, 8))
    RuleSet.from_spans([]).check_vocabulary(32, (0,))
    with pytest.raises(TokenizerMismatchError, match=r"0\.\.31, the tokenizer's .*; got 32"):
        RuleSet.from_spans([(1, 32)]).check_vocabulary(32, ())
    rules = RuleSet.from_spans([(1, 2), (3, 7, 4), (5, 6, 7), (1, 2, 3)])
    with pytest.raises(RuleSetError, match=r"got \[3, 7, 4\] and 1 more of 3 tokens"):
        rules.check_vocabulary(32, (0, 7))


@pytest.mark.parametrize(
    ("span", "error"), [((1, 0), RuleSetError), ((1, 32), TokenizerMismatchError)]
)
def test_a_checkpoint_with_such_rules_is_refused(
    tiny_llama: Backbone, span: tuple[int, ...], error: type[UmimError]
) -> None:
    rules = RuleSet.from_spans([span])  # of an unknown tokenizer
    with pytest.raises(error, match=r"of the tokenizer|vocabulary"):
        Checkpoint.of(fresh_model(tiny_llama, rules)).check_backbone(tiny_llama)


ORIGIN = RuleOrigin().record() | {
    "tau": 1,
    "overlap": "greedy",
    "containment": "drop",
    "segment_length": 64,
    "tokenizer_fingerprint": "a" * 64,
    "corpus_digest": "b" * 64,
}


def write_rules(directory: Path, table: pa.Table) -> Path:
    """Write a rule directory by hand, with a manifest that fits its files."""
    directory.mkdir()
    pq.write_table(table, directory / "rules.parquet")
    write_manifest(directory, kind="rules", schema=2, body=ORIGIN)
    return directory


def table_of(rows: list[tuple[object, object, object]]) -> pa.Table:
    columns = zip(zip(*rows, strict=True), TABLE_SCHEMA, strict=True)
    return pa.table([pa.array(list(c), f.type) for c, f in columns], schema=TABLE_SCHEMA)


GOOD = [(2, [1, 2], 5), (2, [1, 3], 5), (3, [0, 1, 2], 7), (4, [0, 0, 0, MAX_TOKEN_ID], 1)]


def test_a_directory_written_by_hand_loads(tmp_path: Path) -> None:
    rules = RuleSet.load(write_rules(tmp_path / "rules", table_of(GOOD)))
    assert rules.counts_by_order == {2: 2, 3: 1, 4: 1}
    assert rules.ids_by_order[4].tolist() == [[0, 0, 0, MAX_TOKEN_ID]]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([(2, [1, -1], 5)], r"rule ids must lie in 0\.\.262143; got -1\.\.1"),
        ([(2, [1, MAX_TOKEN_ID + 1], 5)], r"must lie in 0\.\.262143; got 1\.\.262144"),
        ([(17, list(range(17)), 5)], "rules of 2 to 16 ids"),
        ([(1, [1], 5)], "rules of 2 to 16 ids"),
        ([(3, [1, 2], 5)], "rules of 2 to 16 ids"),
        ([(3, [1, 2], 5), (2, [1, 2, 3], 5)], "rules of 2 to 16 ids"),
        ([(3, [1, 2, 3], 5), (2, [1, 2], 5)], "sorted by n"),
        ([(2, [1, 2], 5), (2, [1, 2], 5)], r"sorted and all different; got \[1, 2\]"),
        ([(2, [1, 3], 5), (2, [1, 2], 5)], r"sorted and all different; got \[1, 2\]"),
        ([(2, [2, 0], 5), (2, [1, 9], 5)], "sorted and all different"),
        ([(2, [1, 2], 0)], "every count must reach tau; got 0"),
        ([(2, None, 5)], "no nulls"),
        ([(2, [1, None], 5)], "no nulls"),
        ([(None, [1, 2], 5)], "no nulls"),
        ([(2, [1, 2], None)], "no nulls"),
    ],
)
def test_malformed_rows_are_refused(tmp_path: Path, rows: list, message: str) -> None:
    with pytest.raises(RuleSetError, match=message):
        RuleSet.load(write_rules(tmp_path / "rules", table_of(rows)))


def typed(name: str, kind: pa.DataType) -> Callable[[pa.Table], pa.Table]:
    return lambda table: table.set_column(
        table.column_names.index(name), name, table[name].cast(kind)
    )


@pytest.mark.parametrize(
    "change",
    [
        typed("n", pa.int32()),
        typed("ids", pa.list_(pa.int64())),
        typed("ids", pa.list_(pa.float32())),
        typed("count", pa.float64()),
        lambda table: table.drop_columns(["count"]),
        lambda table: table.append_column("more", table["n"]),
        lambda table: table.select(["ids", "n", "count"]),
        lambda table: table.rename_columns(["n", "ids", "support"]),
    ],
)
def test_other_columns_are_refused(tmp_path: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    with pytest.raises(RuleSetError, match="columns n int8, ids list<int32>, count int64"):
        RuleSet.load(write_rules(tmp_path / "rules", change(table_of(GOOD))))


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" + b"\xff" * 64 + b"PAR1", b"text" * 99])
def test_a_table_that_is_no_parquet_file_is_refused(tmp_path: Path, content: bytes) -> None:
    directory = write_rules(tmp_path / "rules", table_of(GOOD))
    (directory / "rules.parquet").write_bytes(content)
    write_manifest(directory, kind="rules", schema=2, body=ORIGIN)
    with pytest.raises(RuleSetError, match="must be a Parquet file"):
        RuleSet.load(directory)


WRONG = [
    *(("tau", value) for value in ("five", 2.5)),
    *(("source", value) for value in ("hearsay", None)),
    *(("overlap", "clever"), ("containment", None), ("segment_length", "512")),
    *(("tokenizer_fingerprint", 7), ("min_documents", "2")),
    *((name, ...) for name in ORIGIN),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_manifest_that_does_not_describe_its_rules_is_refused(
    tmp_path: Path, name: str, value: object
) -> None:
    directory = write_rules(tmp_path / "rules", table_of(GOOD))
    body = {key: x for key, x in (ORIGIN | {name: value}).items() if x is not ...}
    write_manifest(directory, kind="rules", schema=RULES_SCHEMA, body=body)
    found = f"got no {name}" if value is ... else name
    with pytest.raises(ArtifactError, match=f"must describe its rules.*{found}"):
        RuleSet.load(directory)


@pytest.mark.parametrize("shape", ["many rows", "one row"])
def test_a_small_file_that_takes_a_gigabyte_is_refused_unread(
    tmp_path: Path, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, ids = (4_000_000, 2) if shape == "many rows" else (1, 17_000_000)
    offsets = np.arange(rows + 1, dtype=np.int32) * ids
    columns = [
        pa.array(np.full(rows, 2, np.int8)),
        pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.zeros(rows * ids, np.int32))),
        pa.array(np.ones(rows, np.int64)),
    ]
    directory = write_rules(tmp_path / "rules", pa.table(columns, schema=TABLE_SCHEMA))
    assert (directory / "rules.parquet").stat().st_size < 1 << 20
    read: list[object] = []
    monkeypatch.setattr(pq.ParquetFile, "read", lambda *args: read.append(args))
    with pytest.raises(RuleSetError, match=f"{rows} rows with {rows * ids} ids"):
        RuleSet.load(directory)
    assert not read
