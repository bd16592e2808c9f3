"""From documents to token ids and their files: pieces, ready ids, segments, all that is refused."""

from __future__ import annotations

import hashlib
import json
import logging
import pickle
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from support.pickle_bomb import PickleBomb, write_bomb
from support.processes import ROOT, output_of
from support.token_artifacts import write_documents
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.errors import ArtifactError, ConfigError, CorpusError
from umim_core.model_sources.gguf_tokenizer import PRE_TOKENIZERS
from umim_core.store.artifacts import directory_digest, payload_files
from umim_core.text import token_ids, tokens
from umim_core.text.sources import TextFiles, TokenIds
from umim_core.text.token_ids import TokenPiece, ids_digest, segment_borders, segment_rows
from umim_core.text.tokens import (
    INDEX,
    TokenFiles,
    check_known,
    cut_part,
    cut_pieces,
    first_ids,
    iter_token_pieces,
    tokenize_parts,
    tokenized_corpus,
    write_index,
    write_part,
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


# A corpus


def test_documents_keep_their_borders(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    for number, text in enumerate(("w1 w2 w3", "", "w4", "w5 w6")):
        (tmp_path / f"{number}.txt").write_text(text)
    source = TextFiles(paths=(f"{tmp_path}/*.txt",))
    with tokenized_corpus(source, tiny_tokenizer, tmp_path) as found:
        assert found[:].tolist() == [1, 2, 3, 4, 5, 6]
        assert found.document_ends().tolist() == [3, 4, 6]
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
    check_known(31, tiny_tokenizer)
    with pytest.raises(CorpusError, match=r"0\.\.31, the tokenizer's vocabulary; got 32"):
        check_known(32, tiny_tokenizer)


@pytest.mark.parametrize("step", [1, 7, 1 << 20])
def test_the_digest_is_that_of_the_ids_in_whole_segments(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_ids, "_HASHED_TOKENS", step)
    ids = list(range(25))
    want = hashlib.sha256(np.array(ids[:20], dtype="<i4").tobytes()).hexdigest()
    for name, last, same in (("a", ids[19:], True), ("b", [99], False)):
        found = write_documents(tmp_path / name, np.array([*ids[:19], *last]))
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


@pytest.mark.parametrize("how", ["raw", "array"])
def test_a_pickle_named_npy_is_refused_and_not_run(tmp_path: Path, how: str) -> None:
    mark, path = tmp_path / "ran", tmp_path / "a.npy"
    payload = PickleBomb(mark)
    write_bomb(path, payload, how)
    with pytest.raises(CorpusError, match="unsigned integer type; got"):
        read_ids(str(path))
    assert not mark.exists()
    # The payload works: had it been loaded, the mark would be there.
    pickle.loads(pickle.dumps(payload))  # noqa: S301
    assert mark.exists()


# Files of ids


Documents = list[list[int]]
DOCUMENTS = st.lists(st.lists(st.integers(0, 2**18 - 1), max_size=9), max_size=9)


def in_pieces(documents: Documents, size: int = 3) -> Iterator[TokenPiece]:
    for document in documents:
        for start in range(0, len(document), size):
            yield np.array(document[start : start + size], np.int64), False
        yield np.zeros(0, np.int64), True


def write(directory: Path, *parts: Documents, size: int = 3) -> TokenFiles:
    written = [write_part(directory, in_pieces(part, size), i) for i, part in enumerate(parts)]
    write_index(directory, written)
    return TokenFiles.open(directory)


@given(
    parts=st.lists(DOCUMENTS, max_size=4),
    size=st.integers(1, 5),
    start=st.none() | st.integers(-40, 40),
    stop=st.none() | st.integers(-40, 40),
)
def test_documents_survive_the_disk_and_slices_are_those_of_the_array(
    tmp_path_factory: pytest.TempPathFactory,
    parts: list[Documents],
    size: int,
    start: int | None,
    stop: int | None,
) -> None:
    files = write(tmp_path_factory.mktemp("tokens"), *parts, size=size)
    documents = list(chain.from_iterable(parts))
    flat = list(chain.from_iterable(documents))
    ends = np.cumsum([len(document) for document in documents], dtype=np.int64)
    assert files[:].tolist() == flat
    assert files[start:stop].tolist() == flat[start:stop]
    assert files.document_ends().tolist() == ends.tolist()
    assert (files[:].dtype, files.document_ends().dtype) == (np.int32, np.int64)
    found = len(files), files.num_documents, files.max_id
    assert found == (len(flat), len(documents), max(flat, default=-1))
    with pytest.raises(ConfigError, match="sliced without a step"):
        files[::2]


def test_a_long_slice_is_a_view_and_short_ones_that_are_kept_hold_no_file(tmp_path: Path) -> None:
    many = (1 << 20) + 1
    files = write_tokens(tmp_path, [(np.zeros(many, np.int32), True)])
    whole = files[:]
    assert not whole.flags.owndata and not whole.flags.writeable
    before = psutil.Process().num_fds()
    kept = [files[at : at + 2] for at in range(300)]
    assert len(kept) == 300 and psutil.Process().num_fds() == before


def test_threads_share_token_files(tmp_path: Path) -> None:
    files = write(tmp_path, [[0, 1, 2]], [[3, 4, 5, 6]])
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda _: [files[at : at + 2].tolist() for at in range(6)], range(200))
        assert all(slices == [[at, at + 1] for at in range(6)] for slices in found)


def test_the_same_tokens_give_the_bytes_of_numpy_in_any_pieces(tmp_path: Path) -> None:
    documents = [[1, 2, 3, 4, 5, 6, 7], [], [8]]
    for size in (1, 2, 7):
        write(tmp_path / str(size), documents, size=size)
    assert len({directory_digest(tmp_path / size) for size in ("1", "2", "7")}) == 1
    names = ["00000.ends.npy", "00000.tokens.npy", INDEX]
    assert sorted(payload_files(tmp_path / "1")) == names
    for name, values in zip(names, ([7, 7, 8], range(1, 9)), strict=False):
        assert np.load(tmp_path / "1" / name).tolist() == list(values)


@given(documents=DOCUMENTS, data=st.data())
def test_a_cut_part_is_one_that_was_written_with_that_limit(
    tmp_path_factory: pytest.TempPathFactory, documents: Documents, data: st.DataObject
) -> None:
    flat = list(chain.from_iterable(documents))
    if not flat:
        return
    base = tmp_path_factory.mktemp("tokens")
    limit = data.draw(st.integers(1, len(flat)))
    cut = cut_part(base / "cut", write_part(base / "cut", in_pieces(documents)), limit)
    assert cut == write_part(base / "limited", in_pieces(documents, 4), limit=limit)
    assert directory_digest(base / "cut") == directory_digest(base / "limited")
    write_index(base / "cut", [cut])
    assert TokenFiles.open(base / "cut")[:].tolist() == flat[:limit]


# Damaged files


def torn(directory: Path) -> None:
    """Two parts, of the documents 1 2 3 4 and 5 6 7."""
    write(directory, [[1, 2, 3, 4]], [[5], [6, 7]])


def _edit(change: Callable[[dict[str, object]], object]) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        index = json.loads((directory / INDEX).read_text())
        change(index)
        (directory / INDEX).write_text(json.dumps(index))

    return apply


def _cut(name: str, count: int = 1) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        (directory / name).write_bytes((directory / name).read_bytes()[:-count])

    return apply


def _other(name: str, array: np.ndarray) -> Callable[[Path], None]:
    """Write another array padded or cut to the size that the index gives the file."""

    def apply(directory: Path) -> None:
        size = (directory / name).stat().st_size
        np.save(directory / name, array)
        with (directory / name).open("r+b") as stream:
            stream.truncate(size)

    return apply


TOKENS, ENDS = "00001.tokens.npy", "00001.ends.npy"
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no index": (lambda d: (d / INDEX).unlink(), r"index\.json must exist"),
    "torn index": (_cut(INDEX, 9), "must be readable JSON"),
    "other kind": (_edit(lambda i: i.update(kind="x")), "must be an index of token files"),
    "older": (_edit(lambda i: i.update(schema_version=1)), "schema_version: Input should be 2"),
    "list": (lambda d: (d / INDEX).write_text("[]"), "must be an index of token files"),
    "float": (_edit(lambda i: i["parts"][0].update(tokens=4.0)), r"parts\.0\.tokens"),
    "id": (_edit(lambda i: i["parts"][0].update(max_id=2**18)), r"parts\.0\.max_id"),
    "twice": (_edit(lambda i: i["parts"].append(i["parts"][0])), "once and in order"),
    "more tokens": (
        _edit(lambda i: i["parts"][1].update(tokens=4)),
        "must hold 4 values of type int32",
    ),
    "no part": (lambda d: (d / TOKENS).unlink(), rf"{TOKENS} must be .*; got .*No such file"),
    "torn part": (_cut(TOKENS), rf"{TOKENS} must be an \.npy array"),
    "torn ends": (_cut(ENDS), rf"{ENDS} must be an \.npy array"),
    "type": (_other(TOKENS, np.zeros(3, np.float32)), "must hold 3 values of type int32"),
    "shape": (_other(TOKENS, np.zeros((3, 1), np.int32)), "must hold 3 values of type int32"),
    "noise": (lambda d: (d / TOKENS).write_bytes(b"x" * 140), r"must be an \.npy array"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_folder_is_refused_when_it_is_opened(tmp_path: Path, case: str) -> None:
    torn(tmp_path)
    break_it, message = BROKEN[case]
    break_it(tmp_path)
    with pytest.raises(ArtifactError, match=message):
        TokenFiles.open(tmp_path)


ALTERED = {
    **{
        f"ids {ids}": (_other(TOKENS, np.array(ids, np.int32)), rf"in 0\.\.7; got ids from {got}")
        for ids, got in (([1, 2, 99], "1 to 99"), ([1, 2, -1], "-1 to 2"))
    },
    **{
        f"ends {ends}": (_other(ENDS, np.array(ends, np.int64)), "must rise to 3, the last token")
        for ends in ([-1, 3], [2, 9], [1, 1], [3, 1])
    },
    "type, later": (_other(TOKENS, np.zeros(3, np.float32)), TOKENS),
    "torn, later": (_cut(TOKENS), TOKENS),
}


@pytest.mark.parametrize("case", ALTERED)
def test_what_is_altered_is_refused_when_it_is_read(tmp_path: Path, case: str) -> None:
    torn(tmp_path)
    files = TokenFiles.open(tmp_path)
    change, message = ALTERED[case]
    change(tmp_path)
    assert files[:4].tolist() == [1, 2, 3, 4], "the part before it is whole"
    with pytest.raises(ArtifactError, match=message):
        files.document_ends() if "ends" in case else files[4:]


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
import numpy as np
from umim_core.errors import ArtifactError
from umim_core.text.tokens import write_part
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))
try:
    write_part(Path(sys.argv[1]), ((np.zeros(1024, np.int32), False) for _ in range(9)))
except ArtifactError as error:
    print(error)
"""


def test_a_disk_that_refuses_is_an_error_with_path_and_bytes(tmp_path: Path) -> None:
    message = output_of(sys.executable, "-c", FULL_DISK, tmp_path)
    assert "00000.tokens.npy (" in message and "must be writable; got File too large" in message
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


def growth(path: Path) -> float:
    """MiB that a process grows by while it tokenises a file to disk."""
    return float(output_of(sys.executable, "-c", GROWTH, path, path.parent / "shards"))


def write_text(path: Path, mebibytes: int) -> None:
    block = (LINE * (-(-(1 << 20) // len(LINE.encode()))))[: 1 << 20]
    with path.open("w", encoding="utf-8") as stream:
        for _ in range(mebibytes):
            stream.write(block)


# At once, 4 MiB of text take the tokenizer some 700 MiB.


@pytest.mark.full
@pytest.mark.parametrize("mebibytes", [4, 256])
def test_a_document_of_any_size_takes_less_than_300_mib(tmp_path: Path, mebibytes: int) -> None:
    write_text(tmp_path / "a.txt", mebibytes)
    assert growth(tmp_path / "a.txt") < 300
