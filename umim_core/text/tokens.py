"""Token ids of a corpus: documents tokenised in pieces, and flat arrays of them on disk.

A folder holds ids and document ends, which are read through memory maps::

    tokens.npy   int32   a b c d e f g    documents [a b c] [d e f g]
    ends.npy     int64   3 7              the positions behind their last tokens
"""

from __future__ import annotations

import logging
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import numpy as np
from numpy.typing import NDArray

from umim_core.errors import ArtifactError, ConfigError, CorpusError, require
from umim_core.progress import counted
from umim_core.store.arrays import array_header, open_array, save_array
from umim_core.store.disk import check_writable, nearest, unwritable
from umim_core.store.scratch import scratch, scratch_folder
from umim_core.text.documents import BadRows, TextPiece
from umim_core.text.sources import Source, TokenIds, not_empty
from umim_core.text.token_ids import AnyInts, Ids, Ints, TokenPiece, check_range, typed_panics

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log: Final = logging.getLogger("umim.progress")
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

IDS: Final = "tokens.npy"
ENDS: Final = "ends.npy"
_INT32: Final = np.dtype("<i4")
_INT64: Final = np.dtype("<i8")
_REBUILD: Final = "Build the artifact again."


# Documents to ids


def cut_pieces(
    parts: Iterable[TextPiece],
    tokenizer: PreTrainedTokenizerBase,
    piece_chars: int = PIECE_CHARS,
    max_piece_chars: int = MAX_PIECE_CHARS,
) -> Iterator[TextPiece]:
    """Cut documents into pieces whose ids, one after the other, are those of the whole."""
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
    """Yield the ids of documents that come in parts, without special tokens; arrays may be empty.

    Long documents go through the tokenizer in pieces (see `cut_pieces`), so that memory is bounded
    and all cores work.
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
    with suppress(GeneratorExit):  # the first ids may be enough
        yield from tokenize_parts(not_empty(source, source.pieces(bad)), tokenizer)
    if bad.count:
        _log.warning("unusable rows skipped: %d, the first: %s", bad.count, bad.first)


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


def check_known(ids: AnyInts, tokenizer: PreTrainedTokenizerBase, what: str = "ids") -> None:
    max_id = int(ids.max(initial=-1))
    rule = f"{what} must lie in 0..{len(tokenizer) - 1}, the tokenizer's vocabulary"
    remedy = "Name the tokenizer that made them."
    require(max_id < len(tokenizer), CorpusError, rule, max_id, remedy)


# Ids to disk


@dataclass(frozen=True)
class TokenFiles:
    """A tokenised corpus in mapped files, which threads and processes may share."""

    ids: NDArray[np.int32]  # [T]
    ends: NDArray[np.int64]  # the position behind the last token of every document [D]

    @classmethod
    def open(cls, directory: Path) -> Self:
        """Map the files of a folder, once they are of their types and fit each other."""
        ids, ends = (open_array(directory / name) for name in (IDS, ENDS))
        for name, values, dtype in ((IDS, ids, _INT32), (ENDS, ends, _INT64)):
            rule = f"{directory / name} must be a flat array of type {dtype.name}"
            found = f"{values.dtype.name} of shape {values.shape}"
            fits = (values.dtype, values.ndim) == (dtype, 1)
            require(fits, ArtifactError, rule, found, _REBUILD)
        borders = np.concatenate([[0], ends])
        rule = f"{directory / ENDS} must rise to {len(ids)}, the last token"
        found = f"ends from {int(ends.min(initial=0))} to {int(ends.max(initial=0))}"
        fits = bool((np.diff(borders) >= 0).all()) and borders[-1] == len(ids)
        require(fits, ArtifactError, rule, found, _REBUILD)
        return cls(ids, ends)


def write_tokens(
    directory: Path, pieces: Iterable[TokenPiece], limit: int | None = None
) -> TokenFiles:
    """Write the first ``limit`` tokens of a corpus, and open them.

    Besides 8 bytes a document, a piece at a time is in memory. A document that is cut off ends
    where the ids do.
    """
    return _written(directory, ((ids, [len(ids)] if last else []) for ids, last in pieces), limit)


def join_tokens(directory: Path, parts: Iterable[Path], limit: int | None = None) -> TokenFiles:
    """Write corpora one behind the other, as if their pieces had been written."""
    opened = map(TokenFiles.open, parts)
    return _written(directory, ((part.ids, part.ends) for part in opened), limit)


def _written(
    directory: Path, blocks: Iterable[tuple[Ids, Sequence[int] | Ints]], limit: int | None
) -> TokenFiles:
    """Write blocks of ids with the ends in them, each file whole or not at all."""
    path, total, ends = directory / IDS, 0, array("q")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with scratch(directory, path.name) as place, place.open("xb") as stream:
            stream.write(array_header(_INT32, (0,)))
            for ids, inside in blocks:
                kept, borders = ids, np.asarray(inside, _INT64)
                if limit is not None and total + len(ids) >= limit:
                    kept, borders = ids[: limit - total], borders[borders < limit - total]
                check_range(kept)
                stream.write(np.ascontiguousarray(kept, _INT32).data)
                ends.frombytes((total + borders).tobytes())
                total += len(kept)
                if total == limit:
                    break
            if total > (ends[-1] if ends else 0):
                ends.append(total)
            stream.seek(0)
            stream.write(array_header(_INT32, (total,)))  # as long as that of no token
            stream.flush()
            place.replace(path)
    except OSError as error:
        raise unwritable(path, 4 * total, error) from error
    save_array(directory / ENDS, np.array(ends, _INT64))
    return TokenFiles.open(directory)


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
        pieces = iter_token_pieces(source, tokenizer)
        yield write_tokens(folder, counted(pieces, "tokens read", lambda piece: len(piece[0])))
