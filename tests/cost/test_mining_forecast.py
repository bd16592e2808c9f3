"""Prediction of the cost of mining a source from a part of it."""

from __future__ import annotations

import gzip
import json
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerFast

from umim_core.cost import mining_forecast
from umim_core.cost.mining_forecast import predict_mining
from umim_core.cost.prediction import Prediction
from umim_core.errors import ConfigError, CorpusError, RuleSetError
from umim_core.mining.counting import count_ngrams
from umim_core.mining.mining_options import MiningOptions
from umim_core.rules.grams import ORDERS
from umim_core.text.sources import Source, source_of
from umim_core.text.token_ids import UniformOffsets

OPTIONS = MiningOptions(tau=2, segment_length=16, threads=1)


@pytest.fixture(scope="module")
def tokenizer(
    tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerFast
) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the heads of files are copied to."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def words(tokens: int, seed: int = 0) -> list[str]:
    return [f"w{i}" for i in np.random.default_rng(seed).integers(1, 32, tokens)]


def predict(
    source: Source, tokenizer: str | None, options: MiningOptions = OPTIONS, **how: int
) -> Prediction:
    found = predict_mining(source, tokenizer=tokenizer, options=options, **how)
    assert found is not None
    return found


def write_text(folder: Path, count: int, tokens: int) -> Source:
    for number in range(count):
        size = tokens // 2 + number * tokens // count  # some are larger than others
        (folder / f"{number:03}.txt").write_text(" ".join(words(size, number)))
    return source_of((f"{folder}/*.txt",))


def total_of(folder: Path) -> int:
    return sum(len(path.read_text().split()) for path in folder.glob("*.txt"))


def test_text_that_fits_into_the_sample_is_known_exactly(
    tmp_path: Path, tokenizer: str, temporary: Path
) -> None:
    found = predict(write_text(tmp_path, 5, 1000), tokenizer)
    assert found.figures["tokens"] == total_of(tmp_path)
    assert list(found.seconds) == ["tokenize", "count_2", "count_3", "count_4"]
    assert list(temporary.iterdir()) == [], "the heads are removed"


def test_the_frequent_ngrams_of_a_whole_sample_are_those_of_the_corpus(
    tmp_path: Path, tokenizer: str
) -> None:
    text = words(8000)
    (tmp_path / "a.txt").write_text(" ".join(text))
    found = predict(source_of((str(tmp_path / "a.txt"),)), tokenizer)
    ids = np.array([int(word[1:]) for word in text])
    want = count_ngrams(ids, UniformOffsets(16, 500), 2)
    for n in ORDERS:
        assert found.figures["frequent"][n] == pytest.approx(len(want.keys[n]), rel=0.02)


def test_larger_text_is_scaled_by_its_bytes(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mining_forecast, "_SAMPLE_BYTES", 40_000)
    source = write_text(tmp_path, 30, 5000)
    size = sum(path.stat().st_size for path in tmp_path.glob("*.txt"))
    assert size > 10 * 40_000, "the sample is a small part"
    found = predict(source, tokenizer)
    assert found.figures["tokens"] == pytest.approx(total_of(tmp_path), rel=0.03)
    assert found.figures["tokens"] == predict(source, tokenizer).figures["tokens"]
    assert found.figures["frequent"] == predict(source, tokenizer).figures["frequent"]


def test_one_large_file_is_read_from_its_beginning(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mining_forecast, "_SAMPLE_BYTES", 20_000)
    # What is no UTF-8 lies behind the sample.
    (tmp_path / "a.txt").write_bytes(" ".join(words(30_000)).encode() + b" \xff")
    found = predict(source_of((str(tmp_path / "a.txt"),)), tokenizer)
    assert found.figures["tokens"] == pytest.approx(30_000, rel=0.03)


@pytest.mark.parametrize("size", [20_000, 20_001])
def test_a_sample_may_end_inside_a_character(
    tmp_path: Path, tokenizer: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mining_forecast, "_SAMPLE_BYTES", size)
    (tmp_path / "a.txt").write_text("é" * 50_000, encoding="utf-8")  # one unknown word
    source = source_of((str(tmp_path / "a.txt"),))
    assert predict_mining(source, tokenizer=tokenizer, options=OPTIONS) is None


@pytest.mark.parametrize("sample_bytes", [10 << 20, 30_000, 1])
def test_json_lines_are_scaled_too(
    tmp_path: Path, tokenizer: str, sample_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mining_forecast, "_SAMPLE_BYTES", sample_bytes)
    rows = [json.dumps({"id": n, "body": " ".join(words(1200, n))}) for n in range(100)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    source = source_of((str(tmp_path / "a.jsonl"),), field="body")
    found = predict(source, tokenizer)
    assert found.figures["tokens"] == pytest.approx(120_000, rel=0.05)
    assert sample_bytes < 10 << 20 or found.figures["tokens"] == 120_000


def test_the_number_of_tokens_may_be_given(tmp_path: Path, tokenizer: str) -> None:
    found = predict(write_text(tmp_path, 3, 1000), tokenizer, tokens=10**9)
    assert found.figures["tokens"] == 10**9
    assert found.disk_bytes > 4e9


def test_an_array_of_ids_needs_no_tokenizer_and_is_known_exactly(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(5000, dtype=np.uint16) % 99)
    found = predict(source_of((str(tmp_path / "a.npy"),)), None)
    assert (found.figures["tokens"], found.seconds["tokenize"]) == (5000, 0.0)


def read_at_most(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mining_forecast, "SAMPLE_TOKENS", tokens)


def packed(folder: Path, kind: str) -> Source:
    """A corpus of 20 documents, 16,000 tokens, in files that do not tell them."""
    texts = [" ".join(words(800, number)) for number in range(20)]
    if kind == "gz":
        for number, text in enumerate(texts):
            (folder / f"{number}.txt.gz").write_bytes(gzip.compress(text.encode()))
        return source_of((f"{folder}/*.gz",))
    if kind == "mixed":
        (folder / "a.txt").write_text(" ".join(texts[:10]))
        (folder / "b.txt.gz").write_bytes(gzip.compress(" ".join(texts[10:]).encode()))
        return source_of((f"{folder}/a.txt", f"{folder}/b.txt.gz"))
    pq.write_table(pa.table({"text": texts}), folder / "a.parquet")
    return source_of((f"{folder}/a.parquet",))


@pytest.mark.parametrize("kind", ["gz", "mixed", "parquet"])
def test_packed_files_need_the_number_of_tokens(
    tmp_path: Path, tokenizer: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = packed(tmp_path, kind)
    read_at_most(4000, monkeypatch)
    with pytest.raises(ConfigError) as caught:
        predict(source, tokenizer)
    name = "parquet" if kind == "parquet" else "text"
    assert str(caught.value) == (
        "the number of tokens must be given where the files do not tell it; got a source of kind "
        f"{name}, compressed or not plain text. Give it with --tokens, e.g. 0.25 times the bytes "
        "of English text."
    )
    assert predict(source, tokenizer, tokens=16_000).figures["tokens"] == 16_000


@pytest.mark.parametrize("kind", ["gz", "parquet"])
def test_packed_files_that_fit_into_the_sample_tell_their_tokens(
    tmp_path: Path, tokenizer: str, kind: str
) -> None:
    source = packed(tmp_path, kind)
    assert predict(source, tokenizer).figures["tokens"] == 16_000
    assert predict(source, tokenizer, tokens=5).figures["tokens"] == 16_000, (
        "what was read is known better"
    )


def test_a_small_corpus_has_no_prediction(tmp_path: Path, tokenizer: str) -> None:
    (tmp_path / "a.txt").write_text(" ".join(words(2048)))
    source = source_of((str(tmp_path / "a.txt"),))
    assert predict(source, tokenizer).figures["tokens"] == 2048
    (tmp_path / "a.txt").write_text(" ".join(words(2047)))
    assert predict_mining(source, tokenizer=tokenizer, options=OPTIONS) is None


def test_long_segments_do_not_hide_the_cost(tmp_path: Path, tokenizer: str) -> None:
    source = write_text(tmp_path, 3, 2000)
    found = predict(source, tokenizer, MiningOptions(tau=2, segment_length=1500, threads=1))
    assert found.figures["tokens"] == total_of(tmp_path)
    assert found.memory_bytes > 0


def test_mining_that_stops_early_is_predicted_so(tmp_path: Path, tokenizer: str) -> None:
    source = write_text(tmp_path, 3, 2000)
    total = total_of(tmp_path)
    assert predict(source, tokenizer, at_most=2048).figures["tokens"] == 2048
    assert predict(source, tokenizer, at_most=10 * total).figures["tokens"] == total


def test_counting_documents_costs_a_pass_more(tmp_path: Path, tokenizer: str) -> None:
    source = write_text(tmp_path, 3, 2000)
    plain, more = (
        predict(source, tokenizer, MiningOptions(tau=2, segment_length=16, min_documents=least))
        for least in (1, 2)
    )
    assert set(more.seconds) - set(plain.seconds) == {"documents"}


def test_candidate_mode_and_workers_are_predicted(tmp_path: Path, tokenizer: str) -> None:
    source = write_text(tmp_path, 5, 2000)
    sampled = MiningOptions(tau=2, segment_length=16, sample_tokens=1000)
    assert list(predict(source, tokenizer, sampled).seconds) == [
        "tokenize",
        "count_sample",
        "recount",
    ]
    assert predict(source, tokenizer).figures["shuffle_bytes"] == 0
    assert predict(source, tokenizer, workers=2).figures["shuffle_bytes"] > 0


BROKEN = {
    "json": ("a.jsonl", b'{"text": "w1"}\n{"text": \n', r"/a\.jsonl:2: a line must be JSON"),
    "field": ("a.jsonl", b'{"body": "w1"}\n', r"/a\.jsonl:1: .*must have the field 'text'"),
    "utf-8": ("a.txt", b"w1 \xff", r"/a\.txt: text must be UTF-8; got .* at byte 3"),
    "NUL": ("a.txt", b"w1 \0", r"/a\.txt: text must not hold NUL; got NUL at byte 3"),
    "empty": ("a.txt", b"", r"one non-empty document; got .*'paths': \['[^']*/a\.txt'\]"),
    "npy": ("a.npy", b"no array", r"/a\.npy: token ids must be a whole \.npy file"),
    "gz": ("a.txt.gz", b"no gzip", r"/a\.txt\.gz: the file must be readable and whole"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_error_names_the_file_of_the_corpus(
    tmp_path: Path, tokenizer: str, temporary: Path, name: str
) -> None:
    file, content, message = BROKEN[name]
    (tmp_path / file).write_bytes(content)
    with pytest.raises(CorpusError, match=message) as caught:
        predict(source_of((str(tmp_path / file),)), tokenizer)
    assert str(temporary) not in str(caught.value)
    assert list(temporary.iterdir()) == []


def test_files_without_text_among_others_do_no_harm(tmp_path: Path, tokenizer: str) -> None:
    source = write_text(tmp_path, 3, 2000)
    (tmp_path / "empty.txt").write_text("")
    assert predict(source, tokenizer).figures["tokens"] == total_of(tmp_path)


@pytest.mark.parametrize("tokens", [0, -5])
def test_a_number_of_tokens_below_one_is_refused(tmp_path: Path, tokens: int) -> None:
    source = source_of((str(tmp_path / "a.txt"),))
    with pytest.raises(ConfigError, match=f"tokens must be at least 1; got {tokens}"):
        predict(source, None, tokens=tokens)


def test_options_out_of_their_bounds_are_refused(tmp_path: Path, tokenizer: str) -> None:
    source = write_text(tmp_path, 1, 2000)
    with pytest.raises(RuleSetError, match="tau must be at least 1"):
        predict(source, tokenizer, MiningOptions(tau=0))
    with pytest.raises(ConfigError, match="text needs a tokenizer"):
        predict(source, None)
    with pytest.raises(CorpusError, match="a corpus file must exist"):
        predict(source_of((str(tmp_path / "no.txt"),)), tokenizer)
