"""Token shards of one file of one split, written by a worker or by this process.

Workers import this module, so it stays free of torch until a job loads its tokenizer.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from umim_core.errors import TokenizerMismatchError
from umim_core.store.disk import not_shared, sees_mark
from umim_core.text.files import expand, is_address
from umim_core.text.readers import BadRows
from umim_core.text.shard_files import Shard
from umim_core.text.shards import SHARD_TOKENS, ShardWriter
from umim_core.text.sources import HubDataset, Source, TokenIds
from umim_core.text.tokens import iter_file_token_pieces

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class TokenizerRef:
    """A tokenizer by name, and what it must be wherever it is loaded."""

    name: str
    revision: str | None
    fingerprint: str


@dataclass(frozen=True)
class TokenJob:
    """One file of one split."""

    split: str
    part: int
    source: Source
    directory: Path
    tokenizer: TokenizerRef
    limit: int | None = None
    shard_tokens: int = SHARD_TOKENS
    threads: int | None = None
    mark: int | None = None


@dataclass
class Tokenized:
    """Shards and skipped rows of one job, or of all jobs of a split."""

    shards: list[Shard] = field(default_factory=list)
    bad: BadRows = field(default_factory=BadRows)

    @property
    def tokens(self) -> int:
        """Tokens in the shards."""
        return sum(shard.tokens for shard in self.shards)


def split_jobs(
    split: str,
    source: Source,
    directory: Path,
    tokenizer: TokenizerRef,
    limit: int | None = None,
    shard_tokens: int = SHARD_TOKENS,
) -> list[TokenJob]:
    """Return the jobs of a split: one per file, in canonical order; see `TokenJob`."""
    sources: list[Source] = [source]
    if not isinstance(source, HubDataset | TokenIds):
        names = [file.location for file in expand(source.paths)]
        places = [name if is_address(name) else os.path.abspath(name) for name in names]
        sources = [source.model_copy(update={"paths": (place,)}) for place in places]
    return [
        TokenJob(split, part, one, directory, tokenizer, limit, shard_tokens)
        for part, one in enumerate(sources)
    ]


def tokenize_file(job: TokenJob) -> Tokenized:
    """Tokenise one file into shards."""
    if job.mark is not None and not sees_mark(job.directory, job.mark):
        raise not_shared(job.directory, socket.gethostname())
    if job.threads is not None:
        os.environ["TOKENIZERS_PARALLELISM"] = "true" if job.threads > 1 else "false"
        os.environ["RAYON_NUM_THREADS"] = str(job.threads)
    bad = BadRows()
    writer = ShardWriter(job.directory, job.shard_tokens, job.part)
    tokenizer = None if isinstance(job.source, TokenIds) else _load(job.tokenizer)
    total = 0
    for ids, last in iter_file_token_pieces(job.source, tokenizer, bad):
        if job.limit is not None:
            ids = ids[: job.limit - total]
        writer.add(ids)
        total += len(ids)
        if last:
            writer.end_document()
        if total == job.limit:
            break
    return Tokenized(writer.finish(), bad)


@lru_cache(maxsize=2)
def _load(ref: TokenizerRef) -> PreTrainedTokenizerBase:
    from umim_core.backbone.fingerprint import tokenizer_fingerprint
    from umim_core.backbone.tokenizer_files import load_tokenizer

    tokenizer = load_tokenizer(ref.name, revision=ref.revision)
    fingerprint = tokenizer_fingerprint(tokenizer)
    if fingerprint != ref.fingerprint:
        raise TokenizerMismatchError(
            f"every machine must load the same tokenizer {ref.name!r}",
            f"{fingerprint[:12]} instead of {ref.fingerprint[:12]}",
            "Pin a revision, or name a directory that all machines share.",
        )
    return tokenizer
