"""Token ids, 0 .. 2^18 - 1: of texts, their checks, and borders of segments in a stream of them.

document 1   document 2    length 4
[a b c d e]  [f g h i]  -> [a b c d] [e f g h]   (i is dropped)
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from umim_core.encodable import encoding_error
from umim_core.errors import CorpusError, GenerationError, UmimError, require, translated

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKEN_BITS: Final = 18
MAX_TOKEN_ID: Final = (1 << TOKEN_BITS) - 1
_HASHED_TOKENS: Final = 1 << 20

Ids = NDArray[np.int32]
Ints = NDArray[np.int64]
AnyInts = NDArray[np.integer]
Offsets = Ints | range  # borders of segments [segments + 1]; a range of equal ones
TokenPiece = tuple[Ids, bool]  # ids, and whether they end their document


def flat(rows: Sequence[Sequence[int] | AnyInts]) -> tuple[Ids, Ints]:
    """Return rows one after the other [T], and their borders [rows + 1]."""
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    parts = [np.asarray(row, dtype=np.int32) for row in rows]
    return np.concatenate([np.zeros(0, np.int32), *parts]), offsets


def segment_borders(tokens: int, length: int) -> range:
    """Return the borders of the whole segments of so many tokens, at least one.

    As an array, those of 1e12 tokens would be 16 GB.
    """
    rule = f"a corpus must hold at least one segment of {length} tokens"
    remedy = "Give more text, or cut it into shorter segments, of 2 tokens or more."
    require(2 <= length <= tokens, CorpusError, rule, f"{tokens} tokens", remedy)
    return range(0, tokens // length * length + 1, length)


def segment_rows(ids: AnyInts, length: int) -> Ids:
    """Return the whole segments of an array of ids [segments, length], at least one."""
    borders = segment_borders(len(ids), length)
    return np.asarray(ids[: borders[-1]], dtype=np.int32).reshape(-1, length)


def spread_rows(rows: int, limit: int) -> list[int]:
    """Return at most ``limit`` rows, evenly spread: neighbours come from the same document."""
    count = min(rows, limit)
    return [index * rows // count for index in range(count)]


def read_ids(ids: AnyInts, low: int, high: int) -> Ids:
    """Return ``ids[low:high]`` as a plain, read-only int32 array after checking its range."""
    chunk = np.asarray(ids[low:high])
    check_range(chunk, start=low)
    if chunk.size != high - low:  # what is missing would be counted as not there
        raise CorpusError(
            f"tokens {low} to {high} of the corpus must be there",
            f"{chunk.size} of {high - low}",
            "On a shared file system, wait until every machine sees the whole files; else "
            "tokenize the text again.",
        )
    view = np.ascontiguousarray(chunk, dtype=np.int32).view()
    view.flags.writeable = False  # so that the compiled loops have one signature
    return view


def id_array(
    ids: AnyInts | Sequence[int],
    size: int,
    where: str = "",
    error: type[UmimError] = GenerationError,
) -> Ints:
    """Return the ids of a row, which may be empty, as an array [T]; they lie below ``size``."""
    rule, remedy = "a row must be a 1-D array of token ids", "Encode a text."
    try:
        array = np.asarray(ids)
    except (ValueError, OverflowError) as odd:  # lists of different lengths inside
        raise error(rule, f"{where}{odd}", remedy) from odd
    fits = array.ndim == 1 and (array.size == 0 or array.dtype.kind in "iu")
    require(fits, error, rule, f"{where}shape {array.shape}, {array.dtype}", remedy)
    wide = array.astype(np.int64)
    outside = array[(wide < 0) | (wide >= size)]
    rule = f"ids must lie between 0 and {size - 1}"
    remedy = "Encode with the model's own tokenizer; merge a prompt once."
    require(not outside.size, error, rule, f"{where}{next(iter(outside), None)}", remedy)
    return wide


def ids_digest(ids: AnyInts, offsets: Offsets) -> str:
    """Return the SHA-256 of the ids in whole segments, as int32: the digest of a corpus."""
    digest = hashlib.sha256()
    total = int(offsets[-1])
    for start in range(0, total, _HASHED_TOKENS):
        digest.update(read_ids(ids, start, min(start + _HASHED_TOKENS, total)).tobytes())
    return digest.hexdigest()


def check_flat(ids: AnyInts) -> None:
    """Refuse an array of rows where one flat array is meant."""
    if ids.ndim != 1:
        raise CorpusError("token ids must be one flat array", f"{ids.ndim} dimensions", "Flatten.")


def check_range(ids: NDArray[np.integer], where: str = "corpus", start: int = 0) -> None:
    """Check that an array holds token ids."""
    check_flat(ids)
    if ids.dtype.kind not in "iu":
        raise CorpusError("token ids must be integers", str(ids.dtype), "Tokenize the text first.")
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) > MAX_TOKEN_ID):
        position = int(np.flatnonzero((ids > MAX_TOKEN_ID) | (ids < 0))[0])
        rule = f"{where}: token ids must lie in 0..{MAX_TOKEN_ID}"
        remedy = "Check the tokenizer; vocabularies of more than 2^18 entries are not supported."
        raise CorpusError(rule, f"{int(ids[position])} at position {start + position}", remedy)


def check_offsets(offsets: Offsets, size: int) -> None:
    """Refuse borders that do not cut ``size`` tokens into consecutive segments.

    A range may leave a remainder, which is dropped.
    """
    if isinstance(offsets, range):
        fits = offsets.step > 0 == offsets.start and len(offsets) > 0 and offsets[-1] <= size
    else:
        fits = bool(len(offsets) and offsets[0] == 0 and offsets[-1] == size)
        fits = fits and not (offsets[1:] < offsets[:-1]).any()
    rule = f"segment borders must rise from 0 to {size}, the number of tokens"
    ends = f"{offsets[0]} to {offsets[-1]}" if len(offsets) else "none"
    remedy = "Give one border more than there are segments."
    require(fits, CorpusError, rule, f"{len(offsets)} borders, {ends}", remedy)


def check_encodable(text: str) -> None:
    """Refuse what is no text or has a lone surrogate: no tokenizer takes it, and none says why."""
    kind = type(text).__name__
    remedy = "Decode bytes, and give one text at a time."
    require(isinstance(text, str), CorpusError, "a text must be a string", kind, remedy)
    rule, found = "text must not hold lone surrogates", encoding_error(text)
    remedy = "Correct it: half of a character of two was cut off."
    require(found is None, CorpusError, rule, found, remedy)


def encode(
    tokenizer: PreTrainedTokenizerBase, text: str, add_special_tokens: bool | None = False
) -> list[int]:
    """Tokenize a text; None adds special tokens, a BOS say, as the tokenizer does by default."""
    check_encodable(text)
    chosen = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
    with typed_panics():
        return list(tokenizer(text, verbose=False, **chosen)["input_ids"])


def is_panic(error: BaseException) -> bool:
    """Return whether an error is a panic of the library of tokenizers, which has no class in it."""
    return type(error).__name__ == "PanicException"


def typed_panics() -> translated:
    """Raise a panic of a tokenizer, on a text that its regular expressions give up, as an error."""
    rule = "a text must be one that the tokenizer can cut"
    return translated(
        lambda error: (
            CorpusError(rule, str(error), "Take another tokenizer.") if is_panic(error) else None
        )
    )


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], *, special: bool = False) -> str:
    """Turn raw ids into text, spaces as they are; special tokens are left out unless asked for."""
    text = tokenizer.decode(
        list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False
    )
    return text if isinstance(text, str) else "".join(text)


def leading_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the special ids that a tokenizer puts before a text by default, a BOS say.

    A worked example: where "a" becomes ``<s> a </s>`` by default, ``[<s>]``.
    """
    bare, marked = encode(tokenizer, "a"), encode(tokenizer, "a", None)
    starts = [k for k in range(len(marked)) if marked[k : k + len(bare)] == bare]
    return marked[: starts[0]] if starts else []
