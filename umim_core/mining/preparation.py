"""A corpus made ready for mining: token files, whole segments, ids that take no part."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from transformers import PreTrainedTokenizerBase

from umim_core.errors import ArtifactError, ConfigError, CorpusError
from umim_core.progress import ProgressLines
from umim_core.rules.protect import protected_ids
from umim_core.store.scratch import scratch_folder
from umim_core.text.sources import Source
from umim_core.text.token_files import TokenFiles, write_tokens
from umim_core.text.token_ids import Offsets, TokenPiece, Tokens, UniformOffsets, read_ids
from umim_core.text.tokens import iter_token_pieces

_HASHED_TOKENS: Final = 1 << 20
_QUIET_SECONDS: Final = 10.0  # what is read sooner needs no line
_log: Final = logging.getLogger("umim.progress")


def check_absent(out: Path) -> None:
    """Refuse an output directory that exists, before hours of counting and not after."""
    if os.path.lexists(out):
        raise ArtifactError(
            "the output directory must not exist", str(out), "Remove it or choose another name."
        )


def excluded_ids(
    tokenizer: PreTrainedTokenizerBase | None, protect: tuple[str, ...]
) -> tuple[int, ...]:
    """Return the ids that take part in no rule: special and protected ones."""
    if tokenizer is None:
        if protect:
            raise ConfigError(
                "protected tokens need a tokenizer", list(protect), "Name it with --tokenizer."
            )
        return ()
    return tuple(int(token) for token in protected_ids(tokenizer, protect))


def whole_segments(
    shards: TokenFiles, tokenizer: PreTrainedTokenizerBase | None, length: int
) -> UniformOffsets:
    """Return the borders of the whole segments of a corpus."""
    offsets = UniformOffsets(length, len(shards) // length)
    if not offsets.count:
        raise CorpusError(
            f"the corpus must hold at least one segment of {length} tokens",
            "less",
            "Give more text or lower --segment-length.",
        )
    if tokenizer is not None:
        check_vocabulary(shards.max_id, tokenizer)
    return offsets


def check_vocabulary(max_id: int, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse ids that the tokenizer does not have."""
    if max_id >= len(tokenizer):
        raise CorpusError(
            f"ids must lie in 0..{len(tokenizer) - 1}, the tokenizer's vocabulary",
            max_id,
            "Name the tokenizer that made them.",
        )


def check_documents(shards: TokenFiles, min_documents: int) -> None:
    """Refuse a threshold that no rule can reach."""
    if shards.num_documents < min_documents:
        raise CorpusError(
            f"min_documents is {min_documents}, so the corpus must have as many documents",
            shards.num_documents,
            "Lower it; ready ids and a text file are one document each.",
        )


@contextmanager
def tokenized_corpus(
    source: Source, tokenizer: PreTrainedTokenizerBase | None, parent: Path
) -> Iterator[TokenFiles]:
    """Give the corpus as token files in a folder that is removed afterwards.

    The folder is made in ``parent``, or in the nearest folder above that exists: parents of an
    output that may never come are not made. Reading that takes longer than ten seconds says how far
    it is, to the logger ``umim.progress``.
    """
    while not os.path.lexists(parent):
        parent = parent.parent
    stack = ExitStack()
    try:
        folder = stack.enter_context(scratch_folder(parent, "umim-tokens"))
    except OSError as error:
        raise ArtifactError(
            f"{parent} must be a folder that can be written",
            error.strerror,
            "Choose a folder of yours.",
        ) from error
    with stack:
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


def ids_digest(ids: Tokens, offsets: Offsets) -> str:
    """Return the SHA-256 of the ids in whole segments, as int32: the digest of a corpus."""
    digest = hashlib.sha256()
    total = int(offsets[-1])
    for start in range(0, total, _HASHED_TOKENS):
        digest.update(read_ids(ids, start, min(start + _HASHED_TOKENS, total)).tobytes())
    return digest.hexdigest()
