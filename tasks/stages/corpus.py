"""Stages ``corpus``, ``mixture``, ``task`` and ``tokenize``: text, questions and token ids."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Final, cast

from tasks.data.tokenizing import TokenizerRef, tokenize_splits
from tasks.run.stage import Artifact, Digest, Metrics, Site, stage
from tasks.stages.named import NamedTask, NamedTokenizer, ReadFiles, without_places
from umim_core.config.corpus import (
    Corpus,
    DocstringCorpus,
    FilesCorpus,
    GeneratedCorpus,
    MixtureCorpus,
    TextPart,
)
from umim_core.config.evaluate import TaskSizes
from umim_core.config.model_base import SPLITS, Split
from umim_core.embedded.docstring_corpus import DOCSTRING_SPLITS, build_corpus, installed_versions
from umim_core.errors import CorpusError, require
from umim_core.store.artifacts import read_json, write_json
from umim_core.store.disk import unwritable, write_rows
from umim_core.store.scratch import scratch
from umim_core.synthetic_corpora.questions import iter_rows, read_selection, split_questions
from umim_core.task_sets.spec import TASKS
from umim_core.text.sources import HubDataset, JsonLines, Source, iter_documents
from umim_core.text.token_ids import Ids
from umim_core.text.tokens import IDS, TokenFiles, check_known

_RECORD = "sources.json"
PART = "part_"  # before the name of a mixture's part, for its own test split
RECORD: Final = "mixture.json"
_LATER: Final = "applied where the text is tokenised"


@dataclass(frozen=True)
class CorpusText:
    """A recipe's corpus with what it is read from: installed packages, files of the user's own."""

    corpus: Corpus

    @cached_property
    def files(self) -> ReadFiles:
        return ReadFiles(self.corpus.sources())

    def identity(self) -> dict[str, object]:
        corpus = self.corpus
        if isinstance(corpus, DocstringCorpus):
            read = installed_versions((*corpus.packages, *corpus.out_of_domain))
            installed = {name: Digest(version) for name, version in read}
            return {"config": corpus, "installed": installed}
        return {"config": without_places(corpus), "files": self.files}


@stage(version=6, free={"text.config.train_tokens": _LATER})
def corpus_stage(
    out: Path, _: Site, *, text: CorpusText, generated: Artifact | None = None
) -> Metrics:
    """Build the text of every split.

    The docstring corpus and a generated one are written out as JSON Lines; sources of the user's
    own are recorded, how they are read with the digests of their files, and read in place by
    :func:`tokenize_stage`.
    """
    corpus = text.corpus
    if isinstance(corpus, DocstringCorpus):
        further, workers = corpus.out_of_domain, os.cpu_count() or 1
        sizes = build_corpus(out, packages=corpus.packages, out_of_domain=further, workers=workers)
        return {f"documents_{name}": float(size) for name, size in sizes.items()}
    # All that decides the text is part of the content, so that a change changes what depends on it.
    read = without_places(text.files.sources)
    write_json(out / _RECORD, {"sources": read, "files": text.files.digests})
    if not isinstance(corpus, GeneratedCorpus):
        return {"splits": float(len(text.files.sources))}
    sampled = cast(Artifact, generated).path
    chosen = split_questions(read_selection(sampled).texts, corpus.splits, corpus.seed)
    for split in SPLITS:
        rows = (row for row in iter_rows(sampled) if chosen[row.question] == split)
        write_rows(out / f"{split}.jsonl", map(asdict, rows))
    return {f"questions_{split}": float(chosen.count(split)) for split in SPLITS}


@stage(version=2)
def task_stage(
    out: Path, _: Site, *, task: NamedTask, sizes: TaskSizes, corpus: Artifact | None
) -> Metrics:
    """Write the questions of a task: of the corpus's documents, or (None) the task's own."""
    own_task = TASKS.find(task.name)
    wanted = {split: getattr(sizes, split) for split in own_task.splits}
    own_task.write(out, wanted, None if corpus is None else corpus.path)
    return {}


@stage(version=5, free={"text": "reaches the stage through the corpus"})
def tokenize_stage(
    out: Path,
    site: Site,
    *,
    corpus: Artifact,
    text: CorpusText,
    train_tokens: int | None,
    tokenizer: NamedTokenizer,
) -> Metrics:
    """Tokenise every split once per tokenizer: token files ``<split>/``."""
    reference = TokenizerRef(tokenizer.name, tokenizer.revision, tokenizer.fingerprint)
    _check_unchanged(corpus, text)
    sources, limits = sources_of_splits(corpus, text), {"train": train_tokens}
    metrics: Metrics = {}
    for split, done in tokenize_splits(sources, out, reference, site.lease, limits).items():
        rule = f"split {split!r} must hold text"
        require(done.tokens > 0, CorpusError, rule, "no tokens", "Check its source.")
        ids = TokenFiles.open(out / split).ids
        check_known(ids, tokenizer.loaded, f"ids of split {split!r}")
        metrics[f"tokens_{split}"] = float(done.tokens)
        metrics[f"bad_rows_{split}"] = float(done.bad.count)
    _check_unchanged(corpus, text)  # what was read is what the key names
    return metrics


def _check_unchanged(corpus: Artifact, text: CorpusText) -> None:
    """Refuse files of the user's own that changed since the corpus stage recorded them."""
    if isinstance(text.corpus, FilesCorpus | GeneratedCorpus):
        record = read_json(corpus.path / _RECORD)
        known = record["files"] if isinstance(record, dict) else None
        text.files.check_unchanged("they changed since the corpus stage", known)


def sources_of_splits(corpus: Artifact, text: CorpusText) -> dict[str, Source]:
    """Return what each split is read from: a file of the corpus stage, or files in place."""
    names: tuple[str, ...] = ()
    config = text.corpus
    if isinstance(config, DocstringCorpus):
        names = DOCSTRING_SPLITS
    elif isinstance(config, GeneratedCorpus):
        names = SPLITS
    elif isinstance(config, MixtureCorpus):
        names = (*SPLITS, *(f"{PART}{name}" for name in config.parts))
    in_place = {} if isinstance(config, MixtureCorpus) else text.files.sources
    return {**{split: _written(corpus, split) for split in names}, **in_place}


def _written(corpus: Artifact, split: str) -> JsonLines:
    """Return a split's file; docstrings show NUL characters on purpose, models by chance."""
    return JsonLines(paths=(str(corpus.path / f"{split}.jsonl"),), nul="keep")


def split_tokens(artifact: Artifact, split: str) -> Ids:
    """Return a split's token ids [T], read where they are asked for."""
    return TokenFiles.open(artifact.path / split).ids


def check_splits(artifact: Artifact, length: int, timed: int) -> None:
    """Refuse splits of less than a row, and a test split of less than is timed, before training."""
    metrics = artifact.metrics
    for split in splits_with(artifact, ""):
        needed = max(length, timed) if split == "test" else length
        size = int(metrics[f"tokens_{split}"])
        rule = f"split {split!r} must hold {needed} tokens, of which one row or timing is made"
        remedy = "Give more text, or lower segment_length or the benchmark's prompt_lengths."
        require(size >= needed, CorpusError, rule, size, remedy)


def splits_with(artifact: Artifact, prefix: str) -> list[str]:
    """Return the splits of a tokenised corpus by a prefix: ``OOD``, ``PART`` of a mixture, none."""
    return sorted(path.parent.name for path in artifact.path.glob(f"{prefix}*/{IDS}"))


@stage(version=4, free={"text.config.train_tokens": _LATER})
def mixture_stage(out: Path, _: Site, *, text: CorpusText, docstrings: Artifact | None) -> Metrics:
    """Write ``train``, ``valid`` and ``test`` of all parts together, and ``part_<name>`` of each.

    A part's own split holds its test documents whole and in order. ``mixture.json`` records the
    SHA-256 of every file that was read, the licences and the sizes.
    """
    corpus = cast(MixtureCorpus, text.corpus)

    def documents(name: str, split: Split) -> Iterator[str]:
        part = corpus.parts[name]
        if isinstance(part, TextPart):
            return iter_documents(part.source(split))
        return iter_documents(_written(cast(Artifact, docstrings), split))

    metrics: Metrics = {}
    sizes: dict[str, dict[str, object]] = {name: {} for name in corpus.parts}
    for split in SPLITS:
        mixed = mix_documents(
            {name: documents(name, split) for name in corpus.parts},
            out / f"{split}.jsonl",
            seed=corpus.seed,
            max_characters=corpus.max_characters,
        )
        for name, size in mixed.items():
            sizes[name][split] = vars(size)
            metrics[f"documents_{split}_{name}"] = float(size.documents)
            metrics[f"characters_{split}_{name}"] = float(size.characters)
    for name in corpus.parts:
        rows = ({"text": document} for document in documents(name, "test"))
        write_rows(out / f"{PART}{name}.jsonl", rows)
    text.files.check_unchanged("they changed while they were mixed")
    record = {}
    for name, part in corpus.parts.items():
        read: object = {} if docstrings is None else {"docstrings": docstrings.digest}
        if isinstance(part, TextPart):
            read = {split: _read_files(text, f"{name}.{split}") for split in SPLITS}
        record[name] = {"kind": part.kind, "licence": part.licence, "files": read}
        record[name]["sizes"] = sizes[name]
    write_json(out / RECORD, record)
    return metrics


def _read_files(text: CorpusText, name: str) -> dict[str, str]:
    """Return the files of one source, by the names that they have in any folder, with digests."""
    source = text.files.sources[name]
    if isinstance(source, HubDataset):
        shown = source.name if source.folder is None else source.folder.resolve().name
        names = [f"{shown} {source.split}"]
    else:
        names = [PurePosixPath(str(file)).name for file in source.files()]
    read: dict[str, str] = {}
    for number, file in enumerate(names):
        own = file
        while own in read:  # files of one name, of several folders
            own += f" ({number + 1})"
        read[own] = text.files.digests[f"{name}:{number}"]
    return read


@dataclass
class MixedSize:
    """Size of one part of a mixture: documents, the pieces they were cut into, characters."""

    documents: int = 0
    pieces: int = 0
    characters: int = 0


def mix_documents(
    parts: Mapping[str, Iterable[str]], out: Path, *, seed: int, max_characters: int
) -> dict[str, MixedSize]:
    """Write the documents of all parts in one mixed order, as JSON Lines of part and text.

    Long documents are cut first, so that no stretch of the file is of one book alone. The place of
    a piece is decided by a digest of seed, part and its number in the part: every prefix of the
    file holds the parts in about their shares, and the same documents give the same bytes. One
    document and an index of the pieces are in memory; the text waits in a file next to ``out``.

    Returns:
        Size of each part.
    """
    index: list[tuple[bytes, int, int]] = []
    sizes = {name: MixedSize() for name in parts}
    try:
        with scratch(out.parent, out.name) as unsorted, unsorted.open("w+b") as spool:
            for name, documents in parts.items():
                for document in documents:
                    sizes[name].documents += 1
                    sizes[name].characters += len(document)
                    for piece in cut_at_lines(document, max_characters):
                        row = json.dumps({"part": name, "text": piece}, ensure_ascii=False)
                        line = f"{row}\n".encode()
                        key = f"{seed} {name} {sizes[name].pieces}".encode()
                        place = hashlib.blake2b(key, digest_size=16).digest()
                        index.append((place, spool.tell(), len(line)))
                        sizes[name].pieces += 1
                        spool.write(line)
            index.sort()
            with out.open("wb") as mixed:
                for _, start, length in index:
                    spool.seek(start)
                    mixed.write(spool.read(length))
    except OSError as error:
        raise unwritable(out, sum(length for *_, length in index), error) from error
    return sizes


def cut_at_lines(document: str, max_characters: int) -> Iterator[str]:
    r"""Yield a document in pieces of at most so many characters; joined they are the document.

    A piece ends after the last line end that fits, or before the last space, or where it must::

        "one\ntwo three", 9 characters  ->  "one\n", "two three"
    """
    start = 0
    while len(document) - start > max_characters:
        limit = start + max_characters
        end = document.rfind("\n", start, limit) + 1
        if end <= start:
            end = document.rfind(" ", start + 1, limit)
        if end <= start:
            end = limit
        yield document[start:end]
        start = end
    yield document[start:]
