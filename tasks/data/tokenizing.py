"""Tokenising a corpus in parallel: one job per (split, file), a part written where the job runs.

Workers write into the stage's folder, on the driver's machine unless all nodes share its disk; one
that does not see the folder writes nothing. The driver joins the parts of a split.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.cluster.lease import ClusterLease, machines
from umim_core.errors import (
    ClusterError,
    CorpusError,
    TokenizerMismatchError,
    UmimError,
    require,
)
from umim_core.text.documents import BadRows
from umim_core.text.sources import HubDataset, Source, TextFiles, TokenIds
from umim_core.text.tokens import iter_token_pieces, join_tokens, write_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger("umim.tokenize")


@dataclass(frozen=True)
class TokenizerRef:
    """A tokenizer by name, and what it must be wherever it is loaded."""

    name: str
    revision: str | None
    fingerprint: str


@dataclass(frozen=True)
class TokenJob:
    split: str
    part: int | None  # None of a split of one file
    source: Source
    directory: Path  # of the split
    tokenizer: TokenizerRef
    limit: int | None

    @property
    def place(self) -> Path:
        return self.directory if self.part is None else self.directory / f"{self.part:05d}"


@dataclass
class Tokenized:
    """Size and skipped rows of one job, or of all jobs of a split."""

    tokens: int = 0
    bad: BadRows = field(default_factory=BadRows)


Outcome = Tokenized | UmimError


def _jobs(
    split: str, source: Source, directory: Path, tokenizer: TokenizerRef, limit: int | None
) -> list[TokenJob]:
    """Return the jobs of a split: one per file, in canonical order."""
    source = source.absolute()
    sources: list[Source] = [source]
    if not isinstance(source, HubDataset | TokenIds):
        files = [file.location for file in source.files()]
        sources = [source.model_copy(update={"paths": (file,)}) for file in files]
    parts = [None] if len(sources) == 1 else range(len(sources))
    return [
        TokenJob(split, part, one, directory, tokenizer, limit)
        for part, one in zip(parts, sources, strict=True)
    ]


def tokenize_file(job: TokenJob) -> Tokenized:
    bad = BadRows()
    tokenizer = None if isinstance(job.source, TokenIds) else _load(job.tokenizer)
    pieces = iter_token_pieces(job.source, tokenizer, bad)
    return Tokenized(len(write_tokens(job.place, pieces, job.limit).ids), bad)


@lru_cache(maxsize=2)
def _load(ref: TokenizerRef) -> PreTrainedTokenizerBase:
    from umim_core.backbone.tokenizer_files import load_tokenizer, tokenizer_fingerprint

    tokenizer = load_tokenizer(ref.name, revision=ref.revision)
    fingerprint = tokenizer_fingerprint(tokenizer)
    rule = f"every machine must load the same tokenizer {ref.name!r}"
    found = f"{fingerprint[:12]} instead of {ref.fingerprint[:12]}"
    remedy = "Pin a revision, or name a directory that all machines share."
    require(fingerprint == ref.fingerprint, TokenizerMismatchError, rule, found, remedy)
    return tokenizer


def tokenize_splits(
    sources: Mapping[str, Source],
    out: Path,
    tokenizer: TokenizerRef,
    lease: ClusterLease,
    limits: Mapping[str, int | None],
) -> dict[str, Tokenized]:
    """Tokenise all splits into ``out/<split>``, of some only the first tokens (``limits``).

    A corpus of one file per split is tokenised in this process, with the tokenizer's own threads:
    starting Ray's workers would take longer than most such corpora. The function that tokenises a
    file is the same.

    Returns:
        Parts and bad rows per split; the same whatever the workers.
    """
    splits = {
        split: _jobs(split, source, out / split, tokenizer, limits.get(split))
        for split, source in sources.items()
    }
    alone = max(map(len, splits.values())) == 1
    outcomes: dict[str, list[Outcome]] = {split: [] for split in splits}
    while wave := [one for split in splits for one in _next(splits[split], outcomes[split])]:
        results = map(tokenize_file, wave) if alone else _run_on_cluster(wave, lease)
        for job, outcome in zip(wave, results, strict=True):
            outcomes[job.split].append(outcome)
    return {split: _merged(splits[split], outcomes[split]) for split in splits}


def _next(jobs: Sequence[TokenJob], read: Sequence[Outcome]) -> Sequence[TokenJob]:
    """Return the jobs of a split to run next, none once it is whole or has reached its limit.

    Files behind a limit are not read: each wave of a limited split doubles what has been read.
    """
    limit, done = jobs[0].limit, len(read)
    if limit is None:
        return jobs[done:]
    tokens = [0 if isinstance(one, UmimError) else one.tokens for one in read]
    over = sum(tokens) >= limit or any(isinstance(one, UmimError) for one in read)
    return [] if over else jobs[done : max(2 * done, os.cpu_count() or 1)]


def threads_per_job(share: int, sizes: Sequence[int]) -> int:
    """Return the threads of a job: no task may ask for more than one machine has, or it waits."""
    rule = "a node of the Ray cluster must be alive and offer CPUs"
    remedy = "Start a worker node, then run the same command again."
    require(any(sizes), ClusterError, rule, f"{len(sizes)} nodes without", remedy)
    return max(1, min(share, *filter(None, sizes)))


def _run_on_cluster(jobs: Sequence[TokenJob], lease: ClusterLease) -> list[Outcome]:
    lease.ensure()
    sizes = [int(machine.get("CPU", 0)) for machine in machines()]
    threads = threads_per_job(sum(sizes) // len(jobs), sizes)
    calls = {number: partial(_tokenized, job, threads) for number, job in enumerate(jobs)}
    outcomes = dict(lease.run_tasks(calls, threads, writes=jobs[0].directory.parent))
    return [outcomes[number] for number in range(len(jobs))]


def _tokenized(job: TokenJob, threads: int) -> Outcome:
    """Run a job; a typed error is its result, so that the first in canonical order is raised."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    try:
        return tokenize_file(job)
    except UmimError as error:
        return error


def _merged(jobs: Sequence[TokenJob], outcomes: Sequence[Outcome]) -> Tokenized:
    """Join the files of a split up to the limit, and count the tokens and the bad rows."""
    directory, limit = jobs[0].directory, jobs[0].limit
    merged, places = Tokenized(), list[Path]()
    for job, outcome in zip(jobs, outcomes, strict=False):
        if merged.tokens == limit:
            break
        if isinstance(outcome, UmimError):
            raise outcome
        places.append(job.place)
        merged.tokens = min(merged.tokens + outcome.tokens, limit or sys.maxsize)
        merged.bad.add(outcome.bad.count, outcome.bad.first)
    source = jobs[0].source
    allowed = 0 if isinstance(source, TextFiles | TokenIds) else source.max_bad
    if merged.bad.count > allowed:
        rule = f"at most {allowed} rows may be bad, first {merged.bad.first}"
        found = f"{merged.bad.count} bad rows"
        raise CorpusError(rule, found, "Correct the rows, or allow more with max_bad.")
    if merged.bad.count:
        bad = merged.bad
        logger.warning("%s: %d bad rows, first %s", jobs[0].split, bad.count, bad.first)
    if len(jobs) > 1:
        join_tokens(directory, places, limit)
        for job in jobs:  # those behind the limit, too
            shutil.rmtree(job.place, ignore_errors=True)
    return merged
