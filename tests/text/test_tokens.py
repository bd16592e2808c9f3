"""From documents to token ids and their files: pieces, ready ids, segments, all that is refused."""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Callable, Iterator
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from support.processes import ROOT, output_of
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.errors import ArtifactError, ConfigError, CorpusError
from umim_core.model_sources.gguf_tokenizer import PRE_TOKENIZERS
from umim_core.store.artifacts import directory_digest, payload_files
from umim_core.text import token_ids, tokens
from umim_core.text.sources import JsonLines, TextFiles, TokenIds
from umim_core.text.token_ids import TokenPiece, ids_digest, segment_borders, segment_rows
from umim_core.text.tokens import (
    ENDS,
    IDS,
    TokenFiles,
    check_known,
    cut_pieces,
    first_ids,
    iter_token_pieces,
    join_tokens,
    tokenize_parts,
    tokenized_corpus,
    write_tokens,
)

TOKENIZERS = ROOT.parent / "shared" / "data" / "tokenizers"
WORDS = [
    *("the", " sum", " axis", "'s", " 12", "3", ".", ",", " (", "\n", "\r\n", "\n\n", "  ", "\t"),
    *("ü", "世界", "你好", "。", "，", "！", "🙂", "\u2028", "\u00a0", "e\u0301", "A", " B"),
]
TEXTS = st.lists(st.sampled_from(WORDS), max_size=250).map("".join) | st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=200
)


PROSE = (
    "Return the sum of the elements over an axis. It's 3.14, isn't it?\n\n"
    "Parameters\n----------\naxis : int, optional (default: 0).\n    Höhe über null; 10000 km.\n"
) * 40


@pytest.fixture(scope="module", params=["umim-docs-llama", "gpt2", "neox"])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    if request.param.startswith("umim"):
        return load_tokenizer(request.param)
    folder = TOKENIZERS / request.param
    if not folder.is_dir():
        pytest.skip(f"no tokenizer at {folder}")
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def embedded() -> PreTrainedTokenizerBase:
    return load_tokenizer("umim-docs-llama")


def llama_3_like() -> PreTrainedTokenizerBase:
    """Make a BPE whose words take punctuation and line ends together, as Llama 3's do."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = PRE_TOKENIZERS["llama-bpe"].pieces
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    bpe.train_from_iterator([PROSE], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe)


def sentencepiece_like() -> PreTrainedTokenizerBase:
    """Make a BPE that puts a mark in front of every text, as Llama 2's does."""
    bpe = Tokenizer(models.BPE(unk_token="<unk>"))
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>"], show_progress=False, max_token_length=12
    )
    bpe.train_from_iterator(PROSE.split("\n"), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, unk_token="<unk>")


def whole(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False, verbose=False)


def in_parts(text: str, size: int) -> Iterator[tuple[str, bool]]:
    for start in range(0, max(1, len(text)), size):
        yield text[start : start + size], start + size >= len(text)


def documents_of(pieces: Iterator[tuple[np.ndarray, bool]]) -> list[list[int]]:
    found: list[list[int]] = [[]]
    for ids, last in pieces:
        assert ids.dtype == np.int32
        found[-1] += ids.tolist()
        if last:
            found.append([])
    assert found.pop() == []
    return found


def tokenized(documents: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    return documents_of(tokenize_parts(((text, True) for text in documents), tokenizer))


# Pieces


@given(text=TEXTS, piece=st.integers(1, 50), size=st.integers(1, 90))
def test_pieces_of_any_text_give_the_ids_of_the_whole(
    tokenizer: PreTrainedTokenizerBase, text: str, piece: int, size: int
) -> None:
    pieces = list(cut_pieces(in_parts(text, size), tokenizer, piece))
    assert "".join(part for part, _ in pieces) == text
    assert [last for _, last in pieces] == [False] * (len(pieces) - 1) + [True]
    ids = chain.from_iterable(whole(part, tokenizer) for part, _ in pieces)
    assert list(ids) == whole(text, tokenizer)


@pytest.mark.parametrize(
    ("text", "least"),
    [
        ("word and word, " * 200, 20),
        ("1,2.5,3\n4,5,6.25\n" * 200, 20),
        ("a,b;c\r\n" * 400, 20),
        ("12 7 1234 " * 300, 20),
        ("你好世界。天地玄黄，" * 300, 20),
    ],
    ids=["prose", "table", "windows lines", "numbers", "chinese"],
)
def test_text_of_many_kinds_has_borders(
    tokenizer: PreTrainedTokenizerBase, text: str, least: int
) -> None:
    pieces = [part for part, _ in cut_pieces([(text, True)], tokenizer, 100)]
    assert len(pieces) >= least
    ids = chain.from_iterable(whole(piece, tokenizer) for piece in pieces)
    assert list(ids) == whole(text, tokenizer)


def test_a_document_without_a_border_in_reach_is_refused(embedded: PreTrainedTokenizerBase) -> None:
    assert len(list(cut_pieces([("0" * 1000, True)], embedded, 100, 1000))) == 1
    with pytest.raises(CorpusError, match=r"a place to cut it every 1000 characters; .*'a b00"):
        list(cut_pieces(in_parts("a b" + "0" * 2000, 64), embedded, 100, 1000))


# Documents


def test_no_special_tokens_no_truncation_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    # A tokenizer of its own: transformers warns once per object.
    tokenizer = load_tokenizer("umim-docs-llama")
    tokenizer.model_max_length = 16
    logger = logging.getLogger("transformers")  # it does not pass records on to the root
    logger.addHandler(caplog.handler)
    try:
        (ids,) = tokenized([PROSE], tokenizer)
        assert caplog.messages == []
        tokenizer(PROSE)
        assert "longer than the specified maximum" in caplog.text, "the warning must exist"
    finally:
        logger.removeHandler(caplog.handler)
    assert tokenizer.decode(ids) == PROSE
    assert len(ids) > tokenizer.model_max_length


@pytest.mark.parametrize(
    ("make", "batch"),
    [
        *((lambda: load_tokenizer("umim-docs-llama"), batch) for batch in (1, 3, 100)),
        *((llama_3_like, 3), (sentencepiece_like, 3)),
    ],
)
def test_documents_give_their_ids_in_order_however_they_are_cut_and_batched(
    make: Callable[[], PreTrainedTokenizerBase], batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "_BATCH_PIECES", batch)
    tokenizer = make()
    documents = ["the sum", "", PROSE * 40, "ü", "the", ""]  # one is longer than two pieces
    assert tokenized(documents, tokenizer) == [whole(text, tokenizer) for text in documents]


def test_a_corpus_is_tokenised_whole_or_up_to_a_limit(
    tmp_path: Path, embedded: PreTrainedTokenizerBase
) -> None:
    texts = ["Return the sum. " * 20_000, "short"]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    source = TextFiles(paths=(f"{tmp_path}/*.txt",))
    documents = [whole(text, embedded) for text in texts]
    assert documents_of(iter_token_pieces(source, embedded)) == documents
    flat = list(chain.from_iterable(documents))
    for most in (1, 5, len(flat) - 1, len(flat), len(flat) + 1):
        assert first_ids(source, embedded, most).tolist() == flat[:most]
    for most in (0, -1):
        with pytest.raises(ConfigError, match=f"limit of tokens must be at least 1; got {most}"):
            first_ids(source, embedded, most)


@pytest.mark.parametrize("most", [1, 99])
def test_skipped_rows_are_told_where_the_first_ids_are_enough_too(
    tmp_path: Path,
    tiny_tokenizer: PreTrainedTokenizerFast,
    caplog: pytest.LogCaptureFixture,
    most: int,
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": 5}\n{"text": "w1 w2"}\n{"text": "w3"}\n')
    source = JsonLines(paths=(f"{tmp_path}/a.jsonl",), max_bad=1)
    with caplog.at_level(logging.WARNING, "umim.progress"):
        assert len(first_ids(source, tiny_tokenizer, most)) == min(most, 3)
    (told,) = caplog.messages
    assert told.startswith("unusable rows skipped: 1, the first: ") and "a.jsonl:1: " in told


# A corpus


def test_documents_keep_their_borders(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    for number, text in enumerate(("w1 w2 w3", "", "w4", "w5 w6")):
        (tmp_path / f"{number}.txt").write_text(text)
    source = TextFiles(paths=(f"{tmp_path}/*.txt",))
    with tokenized_corpus(source, tiny_tokenizer, tmp_path) as found:
        assert found.ids.tolist() == [1, 2, 3, 4, 5, 6]
        assert found.ends.tolist() == [3, 4, 6]
        assert len(list(tmp_path.glob(".umim-tokens.*"))) == 1
    assert list(tmp_path.glob(".umim-tokens.*")) == []


@pytest.mark.parametrize("beside", ["ids.npy", "ids.npy/x", "dangling", "dangling/x"])
def test_a_place_that_is_no_folder_is_refused(tmp_path: Path, beside: str) -> None:
    np.save(tmp_path / "ids.npy", np.arange(9, dtype=np.uint16))
    (tmp_path / "dangling").symlink_to("nowhere")
    source = TokenIds(path=str(tmp_path / "ids.npy"))
    with (
        pytest.raises(ArtifactError, match=r"\(0 bytes\) must be writable; got N"),
        tokenized_corpus(source, None, tmp_path / beside),
    ):
        pytest.fail("it was made")


def test_ids_that_the_tokenizer_does_not_have_are_refused(
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    check_known(np.array([31, 0]), tiny_tokenizer)
    with pytest.raises(CorpusError, match=r"0\.\.31, the tokenizer's vocabulary; got 32"):
        check_known(np.array([32, 0]), tiny_tokenizer)


@pytest.mark.parametrize("step", [1, 7, 1 << 20])
def test_the_digest_is_that_of_the_ids_in_whole_segments(
    step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_ids, "_HASHED_TOKENS", step)
    ids = list(range(25))
    want = hashlib.sha256(np.array(ids[:20], dtype="<i4").tobytes()).hexdigest()
    for last, same in ((ids[19:], True), ([99], False)):
        found = np.array([*ids[:19], *last])
        assert (ids_digest(found, range(0, 21, 10)) == want) == same


@given(
    documents=st.lists(st.lists(st.integers(0, 2**18 - 1), max_size=12), max_size=12),
    length=st.integers(2, 9),
)
def test_segments_are_the_cut_concatenation(documents: list[list[int]], length: int) -> None:
    ids = list(chain.from_iterable(documents))
    expected = [ids[i : i + length] for i in range(0, len(ids) - length + 1, length)]
    if not expected:
        with pytest.raises(CorpusError, match=f"one segment of {length} tokens; got {len(ids)}"):
            segment_borders(len(ids), length)
        return
    rows = segment_rows(np.array(ids, dtype=np.int64), length)
    assert (rows.tolist(), rows.dtype) == (expected, np.int32)
    assert [ids[a:b] for a, b in pairwise(segment_borders(len(ids), length))] == expected


# Ready ids


def read_ids(path: str) -> list[int]:
    return [int(i) for ids, _ in iter_token_pieces(TokenIds(path=path), None) for i in ids]


@pytest.mark.parametrize("dtype", ["u1", "<u2", ">u2", "u4", "u8"])
def test_unsigned_ids_are_used_as_they_are(tmp_path: Path, dtype: str) -> None:
    ids = (np.arange(2**20 + 3) % 2**8).astype(dtype)  # longer than a chunk
    np.save(tmp_path / "a.npy", ids)
    pieces = list(iter_token_pieces(TokenIds(path=str(tmp_path / "a.npy")), None))
    assert [last for _, last in pieces] == [False, False, True]
    assert documents_of(iter(pieces)) == [ids.tolist()]


NO_IDS = {
    "signed": (np.array([1, 2]), None, r"unsigned integer type; got shape \(2,\), dtype int64"),
    "rows": (np.zeros((2, 3), np.uint16), None, r"shape \(2, 3\), dtype uint16"),
    "none": (np.zeros(0, np.uint16), None, r"shape \(0,\)"),
    "large": (np.array([2**64 - 1], np.uint64), None, "got 18446744073709551615 at position 0"),
    **{f"torn {keep}": (np.zeros(100, np.uint16), keep, "non-empty") for keep in (0, 5, 40, -1)},
    "missing": (None, None, "non-empty"),
}


@pytest.mark.parametrize("name", NO_IDS)
def test_arrays_that_are_no_token_ids_are_refused(tmp_path: Path, name: str) -> None:
    array, keep, message = NO_IDS[name]
    path = tmp_path / "a.npy"
    if array is not None:
        np.save(path, array)
        path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CorpusError, match=message):
        read_ids(str(path))


# Files of ids


Documents = list[list[int]]
DOCUMENTS = st.lists(st.lists(st.integers(0, 2**18 - 1), max_size=9), max_size=9)


def in_pieces(documents: Documents, size: int = 3) -> Iterator[TokenPiece]:
    for document in documents:
        for start in range(0, len(document), size):
            yield np.array(document[start : start + size], np.int64), False
        yield np.zeros(0, np.int64), True


@given(parts=st.lists(DOCUMENTS, max_size=4), size=st.integers(1, 5), data=st.data())
def test_documents_survive_the_disk_in_one_file_or_in_parts_whole_or_up_to_a_limit(
    tmp_path_factory: pytest.TempPathFactory,
    parts: list[Documents],
    size: int,
    data: st.DataObject,
) -> None:
    base = tmp_path_factory.mktemp("tokens")
    documents = list(chain.from_iterable(parts))
    flat = list(chain.from_iterable(documents))
    limit = data.draw(st.none() | st.integers(1, len(flat) + 1))
    ends = np.cumsum([len(document) for document in documents], dtype=np.int64)
    if limit is not None and limit <= len(flat):
        ends = np.append(ends[ends < limit], limit)
    whole = write_tokens(base / "whole", in_pieces(documents, size), limit)
    assert (whole.ids.tolist(), whole.ends.tolist()) == (flat[:limit], ends.tolist())
    assert (whole.ids.dtype, whole.ends.dtype) == (np.int32, np.int64)
    for number, part in enumerate(parts):
        write_tokens(base / str(number), in_pieces(part))
    join_tokens(base / "joined", [base / str(number) for number in range(len(parts))], limit)
    assert directory_digest(base / "joined") == directory_digest(base / "whole")
    assert sorted(payload_files(base / "whole")) == [ENDS, IDS]
    for name, values in ((ENDS, ends), (IDS, flat[:limit])):
        assert np.load(base / "whole" / name).tolist() == list(values)


def test_slices_that_are_kept_hold_no_file(tmp_path: Path) -> None:
    ids = write_tokens(tmp_path, [(np.zeros(9000, np.int32), True)]).ids
    assert not ids.flags.owndata and not ids.flags.writeable
    before = psutil.Process().num_fds()
    kept = [ids[at : at + 2] for at in range(300)]
    assert len(kept) == 300 and psutil.Process().num_fds() == before


def _cut(directory: Path, name: str) -> None:
    (directory / name).write_bytes((directory / name).read_bytes()[:-1])


def _other(name: str, values: object, dtype: str) -> Callable[[Path], None]:
    return lambda directory: np.save(directory / name, np.array(values, dtype))


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no ids": (lambda d: (d / IDS).unlink(), rf"{IDS} must be .*; got .*No such file"),
    "torn ids": (lambda d: _cut(d, IDS), rf"{IDS} must be an \.npy array"),
    "torn ends": (lambda d: _cut(d, ENDS), rf"{ENDS} must be an \.npy array"),
    "type": (_other(IDS, [0, 0, 0], "f4"), "must be a flat array of type int32; got float32"),
    "shape": (_other(IDS, [[0], [0], [0]], "i4"), r"of type int32; got int32 of shape \(3, 1\)"),
    "noise": (lambda d: (d / IDS).write_bytes(b"x" * 140), r"must be an \.npy array"),
    "more ids": (_other(IDS, [0, 0, 0, 0], "i4"), "must rise to 4, the last token"),
    **{
        f"ends {ends}": (_other(ENDS, ends, "i8"), "must rise to 3, the last token")
        for ends in ([-1, 3], [2, 9], [1, 1], [3, 1], [])
    },
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_folder_is_refused(tmp_path: Path, case: str) -> None:
    write_tokens(tmp_path, in_pieces([[5], [6, 7]]))
    break_it, message = BROKEN[case]
    break_it(tmp_path)
    with pytest.raises(ArtifactError, match=message):
        TokenFiles.open(tmp_path)


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
import numpy as np
from umim_core.errors import ArtifactError
from umim_core.text.tokens import write_tokens
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))
try:
    write_tokens(Path(sys.argv[1]), ((np.zeros(1024, np.int32), False) for _ in range(9)))
except ArtifactError as error:
    print(error)
"""


def test_a_disk_that_refuses_is_an_error_with_path_and_bytes(tmp_path: Path) -> None:
    message = output_of(sys.executable, "-c", FULL_DISK, tmp_path)
    assert "tokens.npy (" in message and "must be writable; got File too large" in message
    assert list(tmp_path.iterdir()) == [], "nothing half-written stays"


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match="must be writable; got Not a directory"):
        write_tokens(tmp_path / "file" / "tokens", in_pieces([[1]]))


# Memory


GROWTH = """
import resource, sys
from pathlib import Path
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.text.sources import source_of
from umim_core.text.tokens import iter_token_pieces, write_tokens

def peak():  # MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

tokenizer = load_tokenizer("umim-docs-llama")
tokenizer(["warm up"])
before = peak()
write_tokens(Path(sys.argv[2]), iter_token_pieces(source_of((sys.argv[1],)), tokenizer))
print(peak() - before)
"""
LINE = "Return the größe of the array, or 42 if the axis is not given.\n"


# At once, 4 MiB of text take the tokenizer some 700 MiB.


@pytest.mark.full
@pytest.mark.parametrize("mebibytes", [4, 256])
def test_a_document_of_any_size_takes_less_than_300_mib(tmp_path: Path, mebibytes: int) -> None:
    path = tmp_path / "a.txt"
    with path.open("w", encoding="utf-8") as stream:
        for _ in range(mebibytes):
            stream.write(LINE * ((1 << 20) // len(LINE)))
    assert float(output_of(sys.executable, "-c", GROWTH, path, tmp_path / "tokens")) < 300
