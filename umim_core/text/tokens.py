"""Token ids: from documents or from a file, then cut into segments of one length.

document 1   document 2    length 4
[a b c d e]  [f g h i]  -> [a b c d] [e f g h]   (i is dropped)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from umim_core.arrays import open_array
from umim_core.errors import ArtifactError, ConfigError, CorpusError
from umim_core.rules.grams import MAX_TOKEN_ID, cut_segments
from umim_core.text.files import is_address, redacted, without_options
from umim_core.text.pieces import cut_pieces
from umim_core.text.plain import Part
from umim_core.text.readers import BadRows, iter_file_parts, no_text
from umim_core.text.sources import Source, TokenIds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHUNK_IDS: Final = 1 << 20
_BATCH_CHARS: Final = 1 << 20  # about 150 MB inside the tokenizer

TokenPiece = tuple[npt.NDArray[np.int32], bool]  # ids, and whether they end their document


def tokenize_parts(
    parts: Iterable[Part], tokenizer: PreTrainedTokenizerBase, batch_size: int = 256
) -> Iterator[TokenPiece]:
    """Yield the ids of documents that come in parts, without special tokens.

    Long documents go through the tokenizer in pieces, so that memory is bounded and all cores work;
    the ids, one piece after the other, are those of the whole document (see `cut_pieces`).

    Args:
        parts: (text, whether it ends its document), as `iter_parts` gives them.
        tokenizer: The backbone's tokenizer.
        batch_size: Pieces per tokenizer call.

    Yields:
        (int32 array [number of tokens], whether it ends its document); an array may be empty.

    Raises:
        ConfigError: `batch_size` is below 1.
        CorpusError: The tokenizer gives an id above 2^18 - 1, or a document cannot be cut.
    """
    if batch_size < 1:
        raise ConfigError("batch_size must be at least 1", batch_size)
    for batch in _batches(cut_pieces(parts, tokenizer), batch_size):
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
            yield _as_ids(np.asarray(ids, dtype=np.int64), "tokenizer"), last


def tokenize_documents(
    documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, batch_size: int = 256
) -> Iterator[npt.NDArray[np.int32]]:
    """Yield the ids of each document as one array; otherwise as `tokenize_parts`.

    Yields:
        int32 array [number of tokens], one per document, in order; empty for an empty document.
    """
    arrays: list[npt.NDArray[np.int32]] = []
    whole = ((document, True) for document in documents)
    for ids, last in tokenize_parts(whole, tokenizer, batch_size):
        arrays.append(ids)
        if last:
            yield arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
            arrays = []


def iter_token_pieces(
    source: Source, tokenizer: PreTrainedTokenizerBase | None, bad: BadRows | None = None
) -> Iterator[TokenPiece]:
    """Yield a corpus as ids in bounded memory, however long its documents are.

    Args:
        source: Text, or ready ids (one document; the tokenizer is not used).
        tokenizer: The backbone's tokenizer.
        bad: Receives the count of skipped rows while the pieces are consumed.

    Yields:
        (int32 array, whether it ends its document), in order.

    Raises:
        ConfigError: Text is given without a tokenizer.
        CorpusError: The source is unusable or holds no text.
    """
    found = False
    for piece in iter_file_token_pieces(source, tokenizer, bad if bad is not None else BadRows()):
        found = True
        yield piece
    if not found:
        raise no_text(source)


def iter_file_token_pieces(
    source: Source, tokenizer: PreTrainedTokenizerBase | None, bad: BadRows
) -> Iterator[TokenPiece]:
    """Yield what `iter_token_pieces` yields; a source without text gives nothing."""
    if isinstance(source, TokenIds):
        yield from ((ids, False) for ids in iter_token_ids(source))
        yield np.zeros(0, np.int32), True
        return
    if tokenizer is None:
        raise ConfigError(
            "text needs a tokenizer", "none", "Name one, e.g. --tokenizer umim-docs-llama."
        )
    yield from tokenize_parts(iter_file_parts(source, bad), tokenizer)


def open_token_ids(source: TokenIds) -> npt.NDArray[np.unsignedinteger]:
    """Map a ``.npy`` file of token ids into memory.

    Returns:
        Ids [T] of an unsigned integer type; their range is not checked yet.

    Raises:
        CorpusError: The file is missing, torn, no plain ``.npy``, not 1-D, not of an unsigned
            integer type, or empty.
    """
    if is_address(source.path):
        raise CorpusError(
            f"{redacted(without_options(source.path))}: token ids must be a local file",
            "an address",
            "Copy it: ids are memory-mapped.",
        )
    path = Path(source.path)
    try:
        array = open_array(path)
    except ArtifactError as error:
        raise CorpusError(
            f"{path}: token ids must be a whole .npy file of plain integers",
            str(error.value),
            "Write it with numpy.save(path, ids.astype(numpy.uint32)).",
        ) from error
    if array.ndim != 1 or array.dtype.kind != "u" or array.size == 0:
        raise CorpusError(
            f"{path}: token ids must be a non-empty 1-D array of an unsigned integer type",
            f"shape {array.shape}, dtype {array.dtype}",
            "Write it with numpy.save(path, ids.ravel().astype(numpy.uint32)).",
        )
    return array


def iter_token_ids(source: TokenIds) -> Iterator[npt.NDArray[np.int32]]:
    """Yield the ids of a ``.npy`` file in chunks, checked as they are read.

    Yields:
        int32 arrays [up to 2^20].

    Raises:
        CorpusError: As :func:`open_token_ids`, or the file holds an id above 2^18 - 1 (the message
            names its position).
    """
    array = open_token_ids(source)
    for start in range(0, array.size, _CHUNK_IDS):
        yield _as_ids(array[start : start + _CHUNK_IDS], source.path, start)


def segments(
    ids: Iterable[npt.NDArray[np.integer]], length: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """Concatenate documents without separators and cut them into segments.

    The remainder is dropped; a corpus shorter than one segment gives none.

    Args:
        ids: Ids of the documents, or any other chunks of the corpus; 1-D arrays.
        length: Tokens per segment, at least 2.

    Returns:
        ids int32 [segments * length] and offsets int64 [segments + 1]; segment i is
        ``ids[offsets[i]:offsets[i + 1]]``.

    Raises:
        CorpusError: `length` is below 2, or an id is outside 0..2^18 - 1.
    """
    flat = np.empty(_CHUNK_IDS, dtype=np.int32)
    total = 0
    for chunk in ids:
        checked = _as_ids(chunk, "corpus", total)
        while total + checked.size > flat.size:
            # Doubling: one list of all chunks would hold the corpus twice while it is joined.
            flat.resize(2 * flat.size, refcheck=False)
        flat[total : total + checked.size] = checked
        total += checked.size
    flat.resize(total, refcheck=False)
    return cut_segments(flat, length)


def _as_ids(ids: npt.NDArray[np.integer], where: str, start: int = 0) -> npt.NDArray[np.int32]:
    """Return the ids as int32 after a check of their range."""
    if ids.size and (int(ids.max()) > MAX_TOKEN_ID or int(ids.min()) < 0):
        position = int(np.flatnonzero((ids > MAX_TOKEN_ID) | (ids < 0))[0])
        raise CorpusError(
            f"{where}: token ids must be in 0..{MAX_TOKEN_ID}",
            f"{int(ids[position])} at position {start + position}",
            "Check that the file holds ids of the tokenizer you mean.",
        )
    return ids.astype(np.int32)


def _batches(pieces: Iterable[Part], batch_size: int) -> Iterator[list[Part]]:
    """Yield batches of pieces, few enough for the tokenizer's memory."""
    batch: list[Part] = []
    chars = 0
    for piece in pieces:
        if batch and (len(batch) == batch_size or chars + len(piece[0]) > _BATCH_CHARS):
            yield batch
            batch, chars = [], 0
        batch.append(piece)
        chars += len(piece[0])
    if batch:
        yield batch
