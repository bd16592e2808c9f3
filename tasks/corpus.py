"""Stages ``corpus``, ``task`` and ``tokenize``: text, questions and token ids per split."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError

from tasks.lease import ClusterLease
from tasks.stage import Artifact, Metrics, StageSpec, run_stage
from tasks.token_jobs import TokenizerRef, split_jobs
from tasks.tokenizing import tokenize_splits
from umim_core.artifacts import (
    canonical_json,
    directory_digest,
    read_json,
    sha256_bytes,
    write_json,
)
from umim_core.backbone import load_tokenizer
from umim_core.config import DocstringCorpus, FilesCorpus, TaskSizes
from umim_core.embedded.corpus import build_corpus, installed_versions
from umim_core.embedded.task import build_task
from umim_core.errors import CorpusError
from umim_core.fingerprint import tokenizer_fingerprint
from umim_core.text import HubDataset, JsonLines, Source, TokenIds, iter_documents
from umim_core.text.files import expand
from umim_core.text.shard_files import INDEX
from umim_core.text.shards import TokenShards

_RECORD = "sources.json"
DOCSTRING_OOD = ("ood_math", "ood_stdlib")


def corpus_stage(root: Path, corpus: DocstringCorpus | FilesCorpus) -> Artifact:
    """Build the text of every split.

    The docstring corpus is written out as JSON Lines; a corpus of the user's own is recorded by
    the digests of its files and read in place by :func:`tokenize_stage`.
    """
    if isinstance(corpus, FilesCorpus):
        return _files_stage(root, corpus)
    installed = installed_versions((*corpus.packages, *corpus.out_of_domain))
    spec = StageSpec(
        "corpus",
        1,
        {
            "kind": "docstrings",
            "packages": list(corpus.packages),
            "out_of_domain": list(corpus.out_of_domain),
        },
        {"distributions": sha256_bytes(canonical_json(installed).encode())},
    )

    def build(out: Path) -> Metrics:
        report = build_corpus(
            out,
            packages=corpus.packages,
            out_of_domain=corpus.out_of_domain,
            workers=os.cpu_count() or 1,
        )
        return {f"documents_{name}": float(size.documents) for name, size in report.splits.items()}

    return run_stage(root, spec, build)


def _files_stage(root: Path, corpus: FilesCorpus) -> Artifact:
    sources = _files_sources(corpus)
    dumped = {split: source.model_dump(mode="json") for split, source in sources.items()}
    digests = _file_digests(sources)

    def build(out: Path) -> Metrics:
        # The digests are part of the content, so that a changed file changes what depends on it.
        write_json(out / _RECORD, {"sources": dumped, "files": digests})
        return {"splits": float(len(sources))}

    return run_stage(root, StageSpec("corpus", 2, dumped, digests), build)


def _file_digests(sources: Mapping[str, Source]) -> dict[str, str]:
    """Return the SHA-256 of every file that is read in place, by "split:number"."""
    return {
        f"{split}:{number}": digest
        for split, source in sources.items()
        for number, digest in enumerate(_source_digests(source))
    }


def _source_digests(source: Source) -> list[str]:
    """Return the SHA-256 of each file of a source, or a data set's commit.

    Raises:
        CorpusError: If a data set's commit cannot be asked for and none is pinned.
    """
    if not isinstance(source, HubDataset):
        paths = (source.path,) if isinstance(source, TokenIds) else source.paths
        return [file.sha256() for file in expand(paths)]
    if Path(source.name).is_dir():
        return [directory_digest(Path(source.name))]
    try:
        return [str(HfApi().dataset_info(source.name, revision=source.revision).sha)]
    except (OSError, HfHubHTTPError) as error:
        if source.revision is not None:
            return [source.revision]
        raise CorpusError(
            "a data set must be reachable, or pinned by its revision",
            source.name,
            "Name a revision (a commit), or a local folder.",
        ) from error


def _check_unchanged(corpus: Artifact, config: FilesCorpus) -> None:
    """Refuse files that changed since the corpus stage recorded them.

    Raises:
        CorpusError: If one did.
    """
    record = read_json(corpus.path / _RECORD)
    if not isinstance(record, dict) or record["files"] != _file_digests(_files_sources(config)):
        raise CorpusError(
            "the corpus files must stay as they are while the pipeline runs",
            "they changed since the corpus stage",
            "Run the same command again.",
        )


def task_stage(root: Path, corpus: Artifact, sizes: TaskSizes) -> Artifact:
    """Build the embedded multiple-choice task from a docstring corpus."""
    spec = StageSpec("task", 1, sizes.model_dump(), {"corpus": corpus.digest})

    def build(out: Path) -> Metrics:
        build_task(corpus.path, out, sizes=sizes.model_dump())
        return {}

    return run_stage(root, spec, build)


def tokenize_stage(
    root: Path,
    lease: ClusterLease,
    corpus: Artifact,
    config: DocstringCorpus | FilesCorpus,
    backbone: str,
    revision: str | None = None,
    separator: int | None = None,
) -> Artifact:
    """Tokenise every split once per tokenizer: a folder ``<split>/`` of token shards each.

    Args:
        root: Artifact root; on a cluster of several machines one they share.
        lease: The cluster, started only for corpora of several files.
        corpus: The corpus stage's artifact.
        config: What the corpus was made from.
        backbone: Name of the tokenizer.
        revision: Its hub revision.
        separator: Token id that ends each document; None for nothing, as mining wants it.
    """
    tokenizer = load_tokenizer(backbone, revision=revision)
    reference = TokenizerRef(backbone, revision, tokenizer_fingerprint(tokenizer))
    spec = StageSpec(
        "tokenize",
        2,
        {"tokenizer": reference.fingerprint, "train_tokens": config.train_tokens}
        | ({} if separator is None else {"separator": separator}),
        {"corpus": corpus.digest},
    )

    def build(out: Path) -> Metrics:
        if isinstance(config, FilesCorpus):
            _check_unchanged(corpus, config)
        splits = {
            split: split_jobs(
                split,
                source,
                out / split,
                reference,
                separator,
                config.train_tokens if split == "train" else None,
            )
            for split, source in _sources(corpus, config).items()
        }
        metrics: Metrics = {}
        for split, done in tokenize_splits(splits, lease).items():
            if not done.tokens:
                raise CorpusError(
                    f"split {split!r} must hold text", "no tokens", "Check its source."
                )
            highest = max(shard.max_id for shard in done.shards)
            if highest >= len(tokenizer):
                raise CorpusError(
                    f"ids of split {split!r} must lie in 0..{len(tokenizer) - 1}, the vocabulary",
                    highest,
                    "Name the tokenizer that made them.",
                )
            metrics[f"tokens_{split}"] = float(done.tokens)
            metrics[f"bad_rows_{split}"] = float(done.bad.count)
        return metrics

    return run_stage(root, spec, build)


def _sources(corpus: Artifact, config: DocstringCorpus | FilesCorpus) -> dict[str, Source]:
    if isinstance(config, FilesCorpus):
        return _files_sources(config)
    splits = ("train", "valid", "test", *DOCSTRING_OOD)
    return {  # docstrings show NUL characters on purpose
        split: JsonLines(paths=(str(corpus.path / f"{split}.jsonl"),), nul="keep")
        for split in splits
    }


def _files_sources(config: FilesCorpus) -> dict[str, Source]:
    sources = {"train": config.train, "valid": config.valid, "test": config.test}
    return sources | {f"ood_{name}": source for name, source in config.out_of_domain.items()}


def texts(corpus: Artifact, config: DocstringCorpus | FilesCorpus, split: str) -> Iterator[str]:
    """Yield the documents of a split.

    Raises:
        CorpusError: If the split is ready token ids.
    """
    source = _sources(corpus, config)[split]
    if isinstance(source, TokenIds):
        raise CorpusError(f"split {split!r} must be text", source.path, "Name its documents.")
    yield from iter_documents(source)


def tokens(artifact: Artifact, split: str) -> TokenShards:
    """Return a split's token ids, read where they are asked for."""
    return TokenShards.open(artifact.path / split)


def out_of_domain(artifact: Artifact) -> list[str]:
    """Return the names of a tokenised corpus's out-of-domain splits, without their prefix."""
    found = artifact.path.glob(f"ood_*/{INDEX}")
    return sorted(path.parent.name.removeprefix("ood_") for path in found)
