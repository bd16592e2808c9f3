"""Long documents in pieces: the ids of the whole, in bounded memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from support.processes import output_of
from support.source_tree import ROOT
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.errors import CorpusError
from umim_core.text.sources import BadRows, TextFiles
from umim_core.text.tokens import cut_pieces, iter_token_pieces

TOKENIZERS = ROOT.parent / "shared" / "data" / "tokenizers"
WORDS = [
    *("the", " sum", " axis", "'s", " 12", "3", ".", ",", " (", "\n", "\r\n", "\n\n", "  ", "\t"),
    *("ü", "世界", "你好", "。", "，", "！", "🙂", "\u2028", "\u00a0", "e\u0301", "A", " B"),
]
TEXTS = st.lists(st.sampled_from(WORDS), max_size=250).map("".join) | st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=200
)


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


def ids_of(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False, verbose=False)


def in_parts(text: str, size: int) -> Iterator[tuple[str, bool]]:
    for start in range(0, max(1, len(text)), size):
        yield text[start : start + size], start + size >= len(text)


@given(text=TEXTS, piece=st.integers(1, 50), size=st.integers(1, 90))
def test_pieces_of_any_text_give_the_ids_of_the_whole(
    tokenizer: PreTrainedTokenizerBase, text: str, piece: int, size: int
) -> None:
    pieces = list(cut_pieces(in_parts(text, size), tokenizer, piece))
    assert "".join(part for part, _ in pieces) == text
    assert [last for _, last in pieces] == [False] * (len(pieces) - 1) + [True]
    ids = chain.from_iterable(ids_of(part, tokenizer) for part, _ in pieces)
    assert list(ids) == ids_of(text, tokenizer)


@pytest.mark.parametrize("size", [1, 7, 100, 10**6])
def test_the_parts_a_document_comes_in_do_not_move_its_borders(
    embedded: PreTrainedTokenizerBase, size: int
) -> None:
    text = "Return the sum of the elements, 3 of 4.\n世界。你好！" * 60
    whole = list(cut_pieces([(text, True)], embedded, 90))
    assert len(whole) > 10
    assert list(cut_pieces(in_parts(text, size), embedded, 90)) == whole


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
    assert list(chain.from_iterable(ids_of(p, tokenizer) for p in pieces)) == ids_of(
        text, tokenizer
    )


def test_a_document_without_a_border_in_reach_is_refused(
    embedded: PreTrainedTokenizerBase,
) -> None:
    assert len(list(cut_pieces([("0" * 1000, True)], embedded, 100, 1000))) == 1
    with pytest.raises(CorpusError, match=r"a place to cut it every 1000 characters; .*'a b00"):
        list(cut_pieces(in_parts("a b" + "0" * 2000, 64), embedded, 100, 1000))


# From files


@pytest.mark.parametrize("at", [0, (1 << 20) - 2, 1 << 20, (3 << 20) + 5])
@pytest.mark.parametrize(
    ("bad", "message"),
    [(b"\xff", "invalid start byte"), (b"\xe4\xb8a", "invalid continuation"), (b"\0", "NUL")],
)
def test_bad_bytes_are_located_anywhere(tmp_path: Path, at: int, bad: bytes, message: str) -> None:
    data = b"x" * at + bad + b"y" * (1 << 20)
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + data)
    with pytest.raises(CorpusError, match=f"{message}.* at byte {at + 3}"):
        list(TextFiles(paths=(str(tmp_path / "a.txt"),)).parts(BadRows()))


def test_a_character_cut_off_at_the_end_is_located(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * (1 << 20) + "世".encode()[:2])
    with pytest.raises(CorpusError, match="unexpected end of data at byte 1048576"):
        list(TextFiles(paths=(str(tmp_path / "a.txt"),)).parts(BadRows()))


def test_token_pieces_are_the_documents(tmp_path: Path, embedded: PreTrainedTokenizerBase) -> None:
    texts = ["Return the sum. " * 40_000, "short"]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    found: list[list[int]] = [[]]
    for ids, last in iter_token_pieces(TextFiles(paths=(f"{tmp_path}/*.txt",)), embedded):
        found[-1] += ids.tolist()
        if last:
            found.append([])
    assert found == [*(ids_of(text, embedded) for text in texts), []]


# Memory

GROWTH = """
import resource, sys
from pathlib import Path
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.text.sources import source_of
from umim_core.text.tokens import iter_token_pieces
from umim_core.text.token_files import write_tokens

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
