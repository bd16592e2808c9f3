"""Tokenization of documents, and token ids from a file."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from umim_core.addresses import is_address
from umim_core.errors import ArtifactError, ConfigError, CorpusError, require
from umim_core.progress import ProgressLines
from umim_core.store.arrays import open_array
from umim_core.store.disk import check_writable, nearest
from umim_core.store.scratch import scratch_folder
from umim_core.text.files import CorpusFile
from umim_core.text.rows import BadRows, TextPiece
from umim_core.text.sources import Source, TokenIds, not_empty
from umim_core.text.token_files import TokenFiles, write_tokens
from umim_core.text.token_ids import Ids, TokenPiece, check_range, typed_panics

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log: Final = logging.getLogger("umim.progress")
_QUIET_SECONDS: Final = 10.0  # what is read sooner needs no line
_CHUNK_IDS: Final = 1 << 20
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
                raise CorpusError(
                    f"a document must have a place to cut it every {max_piece_chars} characters",
                    f"none in {text[start : start + 40]!r}...",
                    "Break its lines, split it into several documents or leave it out.",
                )
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
    source: Source, tokenizer: PreTrainedTokenizerBase | None
) -> Iterator[TokenPiece]:
    """Yield a corpus as ids in bounded memory, however long its documents are.

    Rows that were skipped are told at the end, to the logger ``umim.progress``.

    Yields:
        (int32 array, whether it ends its document), in order.
    """
    bad = BadRows()
    yield from not_empty(source, iter_file_token_pieces(source, tokenizer, bad))
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


def iter_file_token_pieces(
    source: Source, tokenizer: PreTrainedTokenizerBase | None, bad: BadRows
) -> Iterator[TokenPiece]:
    """Yield what `iter_token_pieces` yields; a source without text gives nothing."""
    if isinstance(source, TokenIds):
        yield from ((ids, False) for ids in iter_token_ids(source))
        yield np.zeros(0, np.int32), True
        return
    if tokenizer is None:
        raise ConfigError("text needs a tokenizer", "none", "Name one: --tokenizer NAME.")
    yield from tokenize_parts(source.parts(bad), tokenizer)


def iter_token_ids(source: TokenIds) -> Iterator[Ids]:
    """Yield the ids of a ``.npy`` file in chunks, checked as they are read.

    Yields:
        int32 arrays [up to 2^20].
    """
    file, path = CorpusFile(source.path), Path(source.path)
    rule = f"{file}: token ids must be a non-empty 1-D array of an unsigned integer type"
    remedy = "Write it to a local file with numpy.save(path, ids.ravel().astype(numpy.uint32))."
    require(not is_address(source.path), CorpusError, rule, "an address", remedy)
    try:
        array = open_array(path)
    except ArtifactError as error:
        raise CorpusError(rule, str(error.value), remedy) from error
    right = array.ndim == 1 and array.dtype.kind == "u" and array.size > 0
    require(right, CorpusError, rule, f"shape {array.shape}, dtype {array.dtype}", remedy)
    for start in range(0, array.size, _CHUNK_IDS):
        ids = array[start : start + _CHUNK_IDS]
        check_range(ids, source.path, start)
        yield ids.astype(np.int32)


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


def check_known(max_id: int, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse ids that the tokenizer does not have."""
    require(
        max_id < len(tokenizer),
        CorpusError,
        f"ids must lie in 0..{len(tokenizer) - 1}, the tokenizer's vocabulary",
        max_id,
        "Name the tokenizer that made them.",
    )
