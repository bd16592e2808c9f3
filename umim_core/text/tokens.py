"""Token ids of a corpus: documents tokenised in pieces, and flat arrays of them on disk.

A folder holds a part for each file of the corpus, ids and document ends, and an index of the parts
in their order; they are read through memory maps::

    00000.tokens.npy   int32   a b c d e f g    documents [a b c] [d e f g]
    00000.ends.npy     int64   3 7              the positions behind their last tokens
    index.json                 tokens, documents and the largest id of every part
"""

from __future__ import annotations

import logging
import re
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from umim_core.errors import ArtifactError, ConfigError, CorpusError, require
from umim_core.progress import ProgressLines
from umim_core.store.arrays import array_header, open_array, save_array
from umim_core.store.artifacts import described, read_json, write_json
from umim_core.store.disk import check_writable, nearest, unwritable
from umim_core.store.scratch import scratch, scratch_folder
from umim_core.text.documents import BadRows, TextPiece
from umim_core.text.sources import Source, TokenIds, not_empty
from umim_core.text.token_ids import MAX_TOKEN_ID, Ids, TokenPiece, check_range, typed_panics

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log: Final = logging.getLogger("umim.progress")
_QUIET_SECONDS: Final = 10.0  # what is read sooner needs no line
_BATCH_PIECES: Final = 256
_BATCH_CHARS: Final = 1 << 20  # about 150 MB inside the tokenizer

PIECE_CHARS: Final = 1 << 17
MAX_PIECE_CHARS: Final = 1 << 26
_WINDOW_CHARS: Final = 200
_BORDERS_TRIED: Final = 16
_LETTER: Final = r"[^\W\d_]"
# Runs of spaces and line ends are avoided: how they split depends on their whole length.
_BORDERS: Final = (
    re.compile(rf"(?<={_LETTER})(?= {_LETTER})"),  # letter | space letter
    re.compile(r"(?:(?<=\S\n)|(?<=\S\r\n))(?=\S)"),  # line end | next line
    re.compile(r"(?<=\S)(?=\r?\n\S)"),  # line | line end
    re.compile(r"(?<=[^\W_])(?= [^\W_])"),  # the same as the first with digits
    re.compile(rf"(?<={_LETTER}[。．！？；，、])(?={_LETTER})"),  # after a full-width stop
    re.compile(rf"(?<={_LETTER})(?=[。．！？；，、]{_LETTER})"),  # before it
)

INDEX: Final = "index.json"
_TOKENS: Final = np.dtype("<i4")
_ENDS: Final = np.dtype("<i8")
_REBUILD: Final = "Build the artifact again."
_COPIED: Final = 1 << 20  # ids of a slice that are copied


# Documents to ids


def cut_pieces(
    parts: Iterable[TextPiece],
    tokenizer: PreTrainedTokenizerBase,
    piece_chars: int = PIECE_CHARS,
    max_piece_chars: int = MAX_PIECE_CHARS,
) -> Iterator[TextPiece]:
    """Cut documents into pieces whose ids, one after the other, are those of the whole.

    Yields:
        (piece, whether it ends its document).
    """
    text, start, searched = "", 0, piece_chars  # searched: from `start`, without a border
    for part, last in parts:
        text, start = text[start:] + part, 0
        margin = piece_chars + (0 if last else _WINDOW_CHARS)
        while len(text) - start > searched + margin:
            if searched > max_piece_chars:
                rule = f"a document must have a place to cut it every {max_piece_chars} characters"
                remedy = "Break its lines, split it into several documents or leave it out."
                raise CorpusError(rule, f"none in {text[start : start + 40]!r}...", remedy)
            begin = start + searched
            border = _border(text, tokenizer, begin, begin + piece_chars)
            if border is None:
                searched += piece_chars
                continue
            yield text[start:border], False
            start, searched = border, piece_chars
        if last:
            yield text[start:], True
            text, start, searched = "", 0, piece_chars


def _border(text: str, tokenizer: PreTrainedTokenizerBase, begin: int, end: int) -> int | None:
    """Return a position in [begin, end) at which the text can be cut, or None."""
    for shape in _BORDERS:
        for _, match in zip(range(_BORDERS_TRIED), shape.finditer(text, begin, end), strict=False):
            at = match.start()
            left, right = text[max(0, at - _WINDOW_CHARS) : at], text[at : at + _WINDOW_CHARS]
            with typed_panics():
                whole, *parts = tokenizer(
                    [left + right, left, right], add_special_tokens=False, verbose=False
                )["input_ids"]
            if list(whole) == [*parts[0], *parts[1]]:
                return at
    return None


def _batches(pieces: Iterable[TextPiece]) -> Iterator[list[TextPiece]]:
    """Yield batches of pieces, few enough for the tokenizer's memory."""
    batch: list[TextPiece] = []
    chars = 0
    for piece in pieces:
        if batch and (len(batch) == _BATCH_PIECES or chars + len(piece[0]) > _BATCH_CHARS):
            yield batch
            batch, chars = [], 0
        batch.append(piece)
        chars += len(piece[0])
    if batch:
        yield batch


def tokenize_parts(
    parts: Iterable[TextPiece], tokenizer: PreTrainedTokenizerBase
) -> Iterator[TokenPiece]:
    """Yield the ids of documents that come in parts, without special tokens.

    Long documents go through the tokenizer in pieces, so that memory is bounded and all cores work;
    the ids, one piece after the other, are those of the whole document (see `cut_pieces`).

    Yields:
        (int32 array [number of tokens], whether it ends its document); an array may be empty.
    """
    for batch in _batches(cut_pieces(parts, tokenizer)):
        with typed_panics():
            encoded = tokenizer(
                [text for text, _ in batch],
                add_special_tokens=False,
                padding=False,
                truncation=False,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,  # no warning about documents longer than the model
            )["input_ids"]
        for ids, (_, last) in zip(encoded, batch, strict=True):
            wide = np.asarray(ids, dtype=np.int64)
            check_range(wide, "tokenizer")
            yield wide.astype(np.int32), last


def iter_token_pieces(
    source: Source, tokenizer: PreTrainedTokenizerBase | None, bad: BadRows | None = None
) -> Iterator[TokenPiece]:
    """Yield a corpus as ids in bounded memory, however long its documents are.

    Rows that are skipped are told at the end, to the logger ``umim.progress``; or, of a part of a
    corpus, which may be empty, they are counted in ``bad``.

    Yields:
        (int32 array, whether it ends its document), in order.
    """
    if isinstance(source, TokenIds):
        yield from ((ids, False) for ids in source.ids())
        yield np.zeros(0, np.int32), True
        return
    if tokenizer is None:
        raise ConfigError("text needs a tokenizer", "none", "Name one: --tokenizer NAME.")
    if bad is not None:
        yield from tokenize_parts(source.pieces(bad), tokenizer)
        return
    bad = BadRows()
    yield from tokenize_parts(not_empty(source, source.pieces(bad)), tokenizer)
    if bad.count:
        _log.warning("unusable rows skipped: %d, the first: %s", bad.count, bad.first[0])


def first_ids(source: Source, tokenizer: PreTrainedTokenizerBase | None, most: int) -> Ids:
    """Return the first ids of a corpus, at most ``most``; text behind them is not read."""
    require(most > 0, ConfigError, "a limit of tokens must be at least 1", most, "Raise it.")
    pieces: list[Ids] = []
    total = 0
    for ids, _ in iter_token_pieces(source, tokenizer):
        pieces.append(ids)
        total += len(ids)
        if total >= most:
            break
    return np.concatenate(pieces)[:most]


def check_known(max_id: int, tokenizer: PreTrainedTokenizerBase) -> None:
    rule = f"ids must lie in 0..{len(tokenizer) - 1}, the tokenizer's vocabulary"
    remedy = "Name the tokenizer that made them."
    require(max_id < len(tokenizer), CorpusError, rule, max_id, remedy)


# Ids to disk


class TokenPart(BaseModel):
    """Entry of the index; ``max_id`` is -1 without tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    number: int = Field(ge=0)
    tokens: int = Field(ge=0)
    documents: int = Field(ge=0)
    max_id: int = Field(ge=-1, le=MAX_TOKEN_ID)

    @property
    def files(self) -> tuple[str, str]:
        """Names of its ids and of its document ends."""
        return f"{self.number:05d}.tokens.npy", f"{self.number:05d}.ends.npy"

    def ids(self, directory: Path) -> NDArray[np.int32]:
        """Map its ids [tokens] (int32)."""
        return _mapped(directory / self.files[0], _TOKENS, self.tokens)

    def ends(self, directory: Path) -> NDArray[np.int64]:
        """Map the ends of its documents, from its own first token [documents] (int64)."""
        return _mapped(directory / self.files[1], _ENDS, self.documents)


class _Index(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["token-files"] = "token-files"
    schema_version: Literal[2] = 2
    parts: tuple[TokenPart, ...]


def write_part(
    directory: Path, pieces: Iterable[TokenPiece], number: int = 0, limit: int | None = None
) -> TokenPart:
    """Write the first ``limit`` tokens of one part, replacing it whole; its files are not indexed.

    Besides 8 bytes a document, a piece at a time is in memory. A document that is cut off ends with
    the part.
    """
    total, max_id, ends = 0, -1, array("q")
    path = directory / f"{number:05d}.tokens.npy"
    is_open = False
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with scratch(directory, path.name) as place, place.open("xb") as stream:
            stream.write(array_header(_TOKENS, (0,)))
            for ids, last in pieces:
                kept = ids if limit is None else ids[: limit - total]
                check_range(kept)
                if kept.size:
                    stream.write(np.ascontiguousarray(kept, _TOKENS).data)
                    total, max_id = total + kept.size, max(max_id, int(kept.max()))
                is_open = not last and (is_open or bool(kept.size))
                if last:
                    ends.append(total)
                if total == limit:
                    break
            if is_open:
                ends.append(total)
            stream.seek(0)
            stream.write(array_header(_TOKENS, (total,)))  # as long as that of no token
            stream.flush()
            place.replace(path)
    except OSError as error:
        raise unwritable(path, 4 * total, error) from error
    part = TokenPart(number=number, tokens=total, documents=len(ends), max_id=max_id)
    save_array(directory / part.files[1], np.array(ends, _ENDS))
    return part


def cut_part(directory: Path, part: TokenPart, tokens: int) -> TokenPart:
    """Cut a part down to its first tokens, as if it had been written with that limit."""
    ids, ends = part.ids(directory), part.ends(directory)
    borders = [0, *ends[: np.searchsorted(ends, tokens)].tolist(), tokens]
    return write_part(directory, ((ids[a:b], True) for a, b in pairwise(borders)), part.number)


def write_index(directory: Path, parts: Sequence[TokenPart]) -> None:
    """Write the index of all parts, in the order the corpus is read."""
    write_json(directory / INDEX, _Index(parts=tuple(parts)).model_dump(mode="json"))


def write_tokens(directory: Path, pieces: Iterable[TokenPiece]) -> TokenFiles:
    """Write a corpus of one part, and open it."""
    part = write_part(directory, pieces)
    write_index(directory, [part])
    return TokenFiles.open(directory)


class TokenFiles:
    """A tokenised corpus: a sequence of int32 ids with document borders.

    Slices read no more than they ask for; threads and processes may share one object.
    """

    def __init__(self, directory: Path, parts: Sequence[TokenPart]) -> None:
        self.directory = directory
        self._parts = tuple(parts)
        self._starts = np.cumsum([0, *(part.tokens for part in parts)], dtype=np.int64)

    @classmethod
    def open(cls, directory: Path) -> Self:
        """Read the index, and check that the files are there, of their types and sizes."""
        raw = read_json(directory / INDEX)
        with described(f"{directory / INDEX} must be an index of token files", _REBUILD):
            parts = _Index.model_validate(raw).parts
        numbers = [part.number for part in parts]
        rule = f"{directory / INDEX} must name its parts once and in order"
        fits = all(before < after for before, after in pairwise(numbers))
        require(fits, ArtifactError, rule, numbers, _REBUILD)
        for part in parts:
            part.ids(directory), part.ends(directory)
        return cls(directory, parts)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, key: slice) -> NDArray[np.int32]:
        """Return the ids of a range: a view of the file where many lie in one part."""
        start, stop, step = key.indices(len(self))
        require(step == 1, ConfigError, "token files are sliced without a step", step, "Slice it.")
        pieces: list[NDArray[np.int32]] = []
        # side="right" skips parts without tokens.
        number = int(np.searchsorted(self._starts, start, side="right")) - 1
        while start < stop:
            base, end = int(self._starts[number]), min(stop, int(self._starts[number + 1]))
            if start < end:
                pieces.append(self._read(self._parts[number], start - base, end - base))
                start = end
            number += 1
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate([np.zeros(0, _TOKENS), *pieces])

    @property
    def num_documents(self) -> int:
        return sum(part.documents for part in self._parts)

    @property
    def max_id(self) -> int:
        """The largest id; -1 for a corpus without tokens."""
        return max((part.max_id for part in self._parts), default=-1)

    def document_ends(self) -> NDArray[np.int64]:
        """Return the position after the last token of every document [num_documents] (int64)."""
        ends = [np.zeros(0, _ENDS)]
        for part, start in zip(self._parts, self._starts, strict=False):
            inside = part.ends(self.directory)
            bounds = np.concatenate([[0], inside, [part.tokens]])
            if (np.diff(bounds) < 0).any() or bounds[-2] != part.tokens:
                path = self.directory / part.files[1]
                rule = f"{path} must rise to {part.tokens}, the last token"
                found = f"ends from {int(inside.min(initial=0))} to {int(inside.max(initial=0))}"
                raise ArtifactError(rule, found, _REBUILD)
            ends.append(start + inside)
        return np.concatenate(ends)

    def _read(self, part: TokenPart, start: int, stop: int) -> NDArray[np.int32]:
        ids = part.ids(self.directory)[start:stop]
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high > part.max_id:  # kernels index tables by them
            rule = f"{self.directory / part.files[0]} must hold ids in 0..{part.max_id}"
            raise ArtifactError(rule, f"ids from {low} to {high}", _REBUILD)
        # A view keeps the file open; whoever keeps thousands of segments must not run out of files.
        return ids if ids.size > _COPIED else ids.copy()


def _mapped(path: Path, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    """Map a file that the index names, once it is as the index says."""
    array = open_array(path)
    rule = f"{path} must hold {count} values of type {dtype.name}"
    found = f"{array.dtype.name} of shape {array.shape}"
    require((array.dtype, array.shape) == (dtype, (count,)), ArtifactError, rule, found, _REBUILD)
    return array


@contextmanager
def tokenized_corpus(
    source: Source, tokenizer: PreTrainedTokenizerBase | None, parent: Path
) -> Iterator[TokenFiles]:
    """Give the corpus as token files in a folder that is removed afterwards.

    The folder is made in ``parent``, or in the nearest folder above that exists: parents of an
    output that may never come are not made. Reading that takes longer than ten seconds says how far
    it is, to the logger ``umim.progress``.
    """
    check_writable(parent)
    with scratch_folder(nearest(parent), "umim-tokens") as folder:
        yield write_tokens(folder, _told(iter_token_pieces(source, tokenizer)))


def _told(pieces: Iterator[TokenPiece]) -> Iterator[TokenPiece]:
    lines, began, tokens = ProgressLines(), time.monotonic(), 0
    for ids, last in pieces:
        yield ids, last
        tokens += len(ids)
        if time.monotonic() - began < _QUIET_SECONDS:
            continue
        if line := lines.see(0, 0, f"{tokens:,} tokens read"):
            _log.info("%s", line)
