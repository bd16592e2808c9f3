"""Tokenising a corpus in parallel: one job per (split, file), a part written where the job runs.

Ray Data runs the jobs; workers write into the stage's folder, for which a worker first looks for a
mark in it. One that does not see it stores its part in object storage, where the driver fetches
them; without such storage it raises an error. The driver reads every part and compares its digest
with the worker's before it writes an index. Workers import this module, so it stays free of torch.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.cluster.worker_errors import as_data, cluster_error, from_data
from tasks.storage.node_files import fetch_inputs
from tasks.storage.remote_root import remote_root
from umim_core.addresses import is_address
from umim_core.checkpoint.checkpoint_index import artifact_root
from umim_core.errors import ClusterError, CorpusError, TokenizerMismatchError, UmimError
from umim_core.store.artifacts import sha256_file
from umim_core.store.disk import leave_mark, not_shared, sees_mark
from umim_core.store.scratch import scratch_folder, sweep
from umim_core.text.rows import BadRows
from umim_core.text.sources import HubDataset, Source, TextFiles, TokenIds
from umim_core.text.token_files import TokenPart, cut_part, write_index, write_part
from umim_core.text.tokens import iter_file_token_pieces

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tasks.cluster.lease import ClusterLease

logger = logging.getLogger("umim.tokenize")


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
    threads: int | None = None
    mark: int | None = None


@dataclass
class Tokenized:
    """Parts and skipped rows of one job, or of all jobs of a split."""

    parts: list[TokenPart] = field(default_factory=list)
    bad: BadRows = field(default_factory=BadRows)

    @property
    def tokens(self) -> int:
        """Tokens in the parts."""
        return sum(part.tokens for part in self.parts)


def split_jobs(
    split: str,
    source: Source,
    directory: Path,
    tokenizer: TokenizerRef,
    limit: int | None = None,
) -> list[TokenJob]:
    """Return the jobs of a split: one per file, in canonical order; see `TokenJob`."""
    sources: list[Source] = [source]
    if not isinstance(source, HubDataset | TokenIds):
        names = [file.location for file in source.files()]
        places = [name if is_address(name) else os.path.abspath(name) for name in names]
        sources = [source.model_copy(update={"paths": (place,)}) for place in places]
    return [
        TokenJob(split, part, one, directory, tokenizer, limit) for part, one in enumerate(sources)
    ]


def tokenize_file(job: TokenJob) -> Tokenized:
    """Tokenise one file into a part."""
    if job.mark is not None and not sees_mark(job.directory, job.mark):
        raise not_shared(job.directory, socket.gethostname())
    if job.threads is not None:
        os.environ["TOKENIZERS_PARALLELISM"] = "true" if job.threads > 1 else "false"
        os.environ["RAYON_NUM_THREADS"] = str(job.threads)
    bad = BadRows()
    tokenizer = None if isinstance(job.source, TokenIds) else _load(job.tokenizer)
    pieces = iter_file_token_pieces(job.source, tokenizer, bad)
    return Tokenized([write_part(job.directory, pieces, job.part, job.limit)], bad)


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


Outcome = Tokenized | UmimError


def tokenize_splits(
    splits: Mapping[str, Sequence[TokenJob]], lease: ClusterLease
) -> dict[str, Tokenized]:
    """Run the jobs of all splits and write an index per split.

    A corpus of one file per split is tokenised in this process, with the tokenizer's own threads:
    starting Ray's workers would take longer than most such corpora. The function that tokenises a
    file is the same.

    Returns:
        Parts and bad rows per split; the same whatever the workers.
    """
    run = _run_here if max(map(len, splits.values())) == 1 else _on_ray(lease)
    outcomes: dict[str, list[Outcome]] = {split: [] for split in splits}
    for wave in _waves(splits, outcomes):
        for job, outcome in zip(wave, run(wave), strict=True):
            outcomes[job.split].append(outcome)
    return {split: _merged(splits[split], outcomes[split]) for split in splits}


def _waves(
    splits: Mapping[str, Sequence[TokenJob]], outcomes: Mapping[str, Sequence[Outcome]]
) -> Iterator[list[TokenJob]]:
    """Yield the jobs to run next, until every split is whole or has reached its limit.

    Files behind a limit are not read: each wave of a limited split doubles what has been read.
    """
    while True:
        wave: list[TokenJob] = []
        for split, jobs in splits.items():
            done = len(outcomes[split])
            limit = jobs[0].limit
            if limit is None:
                wave += jobs[done:]
            elif not _reached(outcomes[split], limit):
                wave += jobs[done : max(2 * done, os.cpu_count() or 1)]
        if not wave:
            return
        yield wave


def _reached(outcomes: Sequence[Outcome], limit: int) -> bool:
    total = 0
    for outcome in outcomes:
        if isinstance(outcome, UmimError):
            return True
        total += outcome.tokens
    return total >= limit


def _run_here(jobs: Sequence[TokenJob]) -> Iterator[Outcome]:
    return map(tokenize_file, jobs)


def threads_per_job(share: int, sizes: Sequence[int]) -> int:
    """Return the threads of a job: no task may ask for more than one machine has, or it waits."""
    smallest = min((size for size in sizes if size), default=None)
    if smallest is None:
        raise ClusterError(
            "a node of the Ray cluster must be alive and offer CPUs",
            f"{len(sizes)} nodes without",
            "Start a worker node, then run the same command again.",
        )
    return max(1, min(share, smallest))


def _on_ray(lease: ClusterLease) -> Callable[[Sequence[TokenJob]], list[Outcome]]:
    """Return a function that runs jobs on the cluster and gives their results in order."""

    def run(jobs: Sequence[TokenJob]) -> list[Outcome]:
        import pyarrow as pa
        import ray
        from ray.exceptions import RayError

        from tasks.data.counting_tables import TASK_RESTARTS, prepare_ray_data

        cpus = lease.ensure().cpus
        sizes = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
        threads = threads_per_job(cpus // len(jobs), sizes)
        marks = {folder: leave_mark(folder) for folder in {job.directory for job in jobs}}
        placed = [replace(job, threads=threads, mark=marks[job.directory]) for job in jobs]
        prepare_ray_data()

        def work(row: dict[str, int]) -> dict[str, object]:
            return {"job": row["job"], "outcome": _outcome(placed[row["job"]])}

        blocks = [pa.table({"job": [number]}) for number in range(len(placed))]
        try:
            plan = ray.data.from_blocks(blocks).map(
                work, num_cpus=threads, max_retries=TASK_RESTARTS
            )
            rows = plan.take_all()
        except RayError as error:
            rule, again = "the workers that tokenise must stay alive", "Run the same command again."
            raise cluster_error(rule, error, again) from error
        outcomes = {row["job"]: row["outcome"] for row in rows}
        return [_result(outcomes[number], job) for number, job in enumerate(placed)]

    return run


def _outcome(job: TokenJob) -> str:
    """Run a job and return its result, or its typed error, as JSON.

    As data, errors keep their parts, and the first one in canonical order is raised, whichever
    worker failed first.
    """
    stored: str | None = None
    try:
        fetch_inputs(job)
        blind = job.mark is not None and not sees_mark(job.directory, job.mark)
        remote = remote_root() if blind else None
        if remote is None:
            done = tokenize_file(job)
            sums = _sums(done, job.directory)
        else:
            artifact_root().mkdir(parents=True, exist_ok=True)
            with scratch_folder(artifact_root(), "parts") as folder:
                done = tokenize_file(replace(job, directory=folder, mark=None))
                sums = _sums(done, folder)
                stored = remote.store_parts({name: folder / name for name in sums})
    except UmimError as error:
        return json.dumps(as_data(error))
    parts = [part.model_dump() for part in done.parts]
    bad = asdict(done.bad)
    return json.dumps({"parts": parts, "bad": bad, "sums": sums, "stored": stored})


def _sums(done: Tokenized, directory: Path) -> dict[str, str]:
    return {name: sha256_file(directory / name) for part in done.parts for name in part.files}


def _result(outcome: str, job: TokenJob) -> Outcome:
    """Return what a worker wrote, once its files are here as it wrote them."""
    result = json.loads(outcome)
    if "error" in result:
        return from_data(result)
    sums = result["sums"]
    if result["stored"] and (remote := remote_root()) is not None:
        remote.take_parts(result["stored"], sums, job.directory)
    for name, written in sums.items():
        path = job.directory / name
        here = sha256_file(path) if path.is_file() else "no file"
        if here != written:
            return ClusterError(
                "a part must be on the driver's disk as its worker wrote it",
                f"{path}: {here} instead of {written}",
                "Set UMIM_ROOT to a place that every node mounts, then run the same command again.",
            )
    parts = [TokenPart.model_validate(part) for part in result["parts"]]
    return Tokenized(parts, BadRows(**result["bad"]))


def _merged(jobs: Sequence[TokenJob], outcomes: Sequence[Outcome]) -> Tokenized:
    """Join the files of a split: cut at the limit, count the bad rows, write the index."""
    directory, limit = jobs[0].directory, jobs[0].limit
    merged = Tokenized()
    for outcome in outcomes:
        room = None if limit is None else limit - merged.tokens
        if room == 0:
            break
        if isinstance(outcome, UmimError):
            raise outcome
        (part,) = outcome.parts
        if room is not None and part.tokens > room:
            part = cut_part(directory, part, room)
        merged.parts.append(part)
        merged.bad.count += outcome.bad.count
        merged.bad.first += outcome.bad.first[: 20 - len(merged.bad.first)]
    source = jobs[0].source
    allowed = 0 if isinstance(source, TextFiles | TokenIds) else source.max_bad
    if merged.bad.count > allowed:
        raise CorpusError(
            f"at most {allowed} rows may be bad, first {merged.bad.first[0]}",
            f"{merged.bad.count} bad rows",
            "Correct the rows, or allow more with max_bad.",
        )
    if merged.bad.count:
        first = merged.bad.first[0]
        logger.warning("%s: %d bad rows, first %s", jobs[0].split, merged.bad.count, first)
    kept = {name for part in merged.parts for name in part.files}
    sweep(directory, None)  # what workers left that died
    for path in directory.iterdir():
        if path.is_file() and path.name not in kept:  # behind the limit
            path.unlink(missing_ok=True)
    write_index(directory, merged.parts)
    return merged
