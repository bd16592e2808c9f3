"""Token ids: from documents or from a file, then cut into segments of one length.

document 1   document 2    length 4
[a b c d e]  [f g h i]  -> [a b c d] [e f g h]   (i is dropped)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from umim_core.errors import ConfigError, CorpusError
from umim_core.rules.counting import MAX_TOKEN_ID, cut_segments
from umim_core.text.sources import TokenIds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHUNK_IDS: Final = 1 << 20
_BATCH_CHARS: Final = 4_000_000  # about 0.5 GB inside the tokenizer
_PIECE_CHARS: Final = 1 << 17
_WINDOW_CHARS: Final = 200
_BORDER: Final = re.compile(r"(?<=[^\W\d_])(?= [^\W\d_])")  # letter | space letter
_BORDERS_TRIED: Final = 16


def tokenize_documents(
    documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, batch_size: int = 256
) -> Iterator[npt.NDArray[np.int32]]:
    """Yield the ids of each document, without special tokens.

    Long documents go through the tokenizer in pieces, so that memory is bounded and all cores work;
    the ids are those of the whole document (see `_pieces`).

    Args:
        documents: Texts.
        tokenizer: The backbone's tokenizer.
        batch_size: Documents, or pieces of long ones, per tokenizer call.

    Yields:
        int32 array [number of tokens], one per document, in order; empty for an empty document.

    Raises:
        ConfigError: `batch_size` is below 1.
        CorpusError: The tokenizer gives an id above 2^18 - 1.
    """
    if batch_size < 1:
        raise ConfigError("batch_size must be at least 1", batch_size)
    parts: list[npt.NDArray[np.int32]] = []
    for batch in _batches(documents, tokenizer, batch_size):
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
            parts.append(_as_ids(np.asarray(ids, dtype=np.int64), "tokenizer"))
            if last:
                yield parts[0] if len(parts) == 1 else np.concatenate(parts)
                parts = []


def iter_token_ids(source: TokenIds) -> Iterator[npt.NDArray[np.int32]]:
    """Yield the ids of a ``.npy`` file in chunks, memory-mapped and checked as they are read.

    Yields:
        int32 arrays [up to 2^20].

    Raises:
        CorpusError: The file is missing, torn, no plain ``.npy``, not 1-D, not of an unsigned
            integer type, empty, or holds an id above 2^18 - 1 (the message names its position).
    """
    path = Path(source.path)
    try:
        # Unlike np.load this opens .npy files only and can never reach the unpickler.
        array = np.lib.format.open_memmap(path, mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise CorpusError(
            f"{path}: token ids must be a whole .npy file of plain integers",
            f"{type(error).__name__}: {error}",
            "Write it with numpy.save(path, ids.astype(numpy.uint32)).",
        ) from error
    if array.ndim != 1 or array.dtype.kind != "u" or array.size == 0:
        raise CorpusError(
            f"{path}: token ids must be a non-empty 1-D array of an unsigned integer type",
            f"shape {array.shape}, dtype {array.dtype}",
            "Write it with numpy.save(path, ids.ravel().astype(numpy.uint32)).",
        )
    for start in range(0, array.size, _CHUNK_IDS):
        yield _as_ids(array[start : start + _CHUNK_IDS], str(path), start)


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


def _batches(
    documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, batch_size: int
) -> Iterator[list[tuple[str, bool]]]:
    """Yield batches of (piece, whether it ends its document)."""
    batch: list[tuple[str, bool]] = []
    chars = 0
    for document in documents:
        for piece in _pieces(document, tokenizer):
            if batch and (len(batch) == batch_size or chars + len(piece[0]) > _BATCH_CHARS):
                yield batch
                batch, chars = [], 0
            batch.append(piece)
            chars += len(piece[0])
    if batch:
        yield batch


def _pieces(
    text: str, tokenizer: PreTrainedTokenizerBase, piece_chars: int = _PIECE_CHARS
) -> Iterator[tuple[str, bool]]:
    """Cut a long document where the tokenizer cuts it anyway.

    Candidates lie between a letter and a space with a letter after it, where no pre-tokenizer in
    use joins, and each one is tried: the 400 characters around it must give the same ids in one
    part and in two. A tokenizer that treats the start of a text specially fails that, and a text
    without such borders has no candidates; then the document stays whole.

    Yields:
        (piece, whether it is the last one).
    """
    start = 0
    while len(text) - start > 2 * piece_chars:
        border = _border(text, tokenizer, start + piece_chars, start + 2 * piece_chars)
        if border is None:
            break
        yield text[start:border], False
        start = border
    yield text[start:], True


def _border(text: str, tokenizer: PreTrainedTokenizerBase, begin: int, end: int) -> int | None:
    """Return the first position in [begin, end) at which the text can be cut, or None."""
    for tried, match in enumerate(_BORDER.finditer(text, begin, end)):
        if tried == _BORDERS_TRIED:
            break
        at = match.start()
        left, right = text[at - _WINDOW_CHARS : at], text[at : at + _WINDOW_CHARS]
        whole, *parts = tokenizer(
            [left + right, left, right], add_special_tokens=False, verbose=False
        )["input_ids"]
        if list(whole) == [*parts[0], *parts[1]]:
            return at
    return None
