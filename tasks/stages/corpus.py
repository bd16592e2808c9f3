"""Stages ``corpus``, ``task`` and ``tokenize``: text, questions and token ids per split."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Final

from tasks.cluster.lease import ClusterLease
from tasks.data.mixing import mix_documents
from tasks.data.tokenizing import TokenizerRef, split_jobs, tokenize_splits
from tasks.run.stage import Artifact, Metrics, StageSpec, run_stage
from umim_core.backbone.fingerprint import tokenizer_fingerprint
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.config.corpus import (
    SPLITS,
    Corpus,
    DocstringCorpus,
    FilesCorpus,
    GeneratedCorpus,
    MixtureCorpus,
    Split,
    TextPart,
)
from umim_core.config.evaluate import TaskSizes
from umim_core.config.recipe import DEFAULT_TASK
from umim_core.embedded.docstring_corpus import build_corpus, installed_versions
from umim_core.errors import CorpusError
from umim_core.progress import followed, leave_note
from umim_core.store.artifacts import canonical_json, read_json, sha256_bytes, write_json
from umim_core.store.disk import write_rows
from umim_core.store.publication import STATE
from umim_core.synthetic_corpora.questions import iter_rows, read_selection, split_questions
from umim_core.task_sets.spec import TASKS, QuestionForm, TaskSet
from umim_core.text.sources import (
    DocumentSource,
    HubDataset,
    JsonLines,
    Source,
    file_digests,
    iter_documents,
)
from umim_core.text.token_files import INDEX, TokenFiles

_RECORD = "sources.json"
_MODULES_A_NOTE: Final = 100
DOCSTRING_OOD = ("ood_math", "ood_stdlib")
OOD = "ood_"  # before the name of an out-of-domain split
PART = "part_"  # before the name of a mixture's part, for its own test split
RECORD: Final = "mixture.json"


def corpus_stage(
    root: Path,
    corpus: DocstringCorpus | FilesCorpus | GeneratedCorpus,
    generated: Artifact | None = None,
) -> Artifact:
    """Build the text of every split.

    The docstring corpus and a generated one are written out as JSON Lines; sources of the user's
    own are recorded by the digests of their files and read in place by :func:`tokenize_stage`.
    """
    if isinstance(corpus, FilesCorpus):
        return _files_stage(root, corpus)
    if isinstance(corpus, GeneratedCorpus):
        return _generated_stage(root, corpus, generated)
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
        def note(done: int, total: int) -> None:
            if done % _MODULES_A_NOTE == 0 or done == total:
                leave_note(out / STATE, done, total, "reading docstrings of modules")

        with followed(out / STATE):
            report = build_corpus(
                out,
                packages=corpus.packages,
                out_of_domain=corpus.out_of_domain,
                workers=os.cpu_count() or 1,
                progress=note,
            )
        return {f"documents_{name}": float(size) for name, size in report.documents.items()}

    return run_stage(root, spec, build)


def _files_stage(root: Path, corpus: FilesCorpus) -> Artifact:
    dumped, digests = _recorded(corpus)

    def build(out: Path) -> Metrics:
        # The digests are part of the content, so that a changed file changes what depends on it.
        write_json(out / _RECORD, {"sources": dumped, "files": digests})
        return {"splits": float(len(dumped))}

    return run_stage(root, StageSpec("corpus", 2, dumped, digests), build)


def _recorded(corpus: FilesCorpus | GeneratedCorpus) -> tuple[dict[str, object], dict[str, str]]:
    """Return the sources of the user's own as they are recorded, and the digests of their files."""
    sources = _in_place(corpus)
    dumped = {split: source.model_dump(mode="json") for split, source in sources.items()}
    return dict(dumped), file_digests(sources)


def _generated_stage(root: Path, corpus: GeneratedCorpus, generated: Artifact | None) -> Artifact:
    if generated is None:
        raise CorpusError(
            "a generated corpus needs its trajectories", "none", "Run the stage generate first."
        )
    dumped, digests = _recorded(corpus)
    spec = StageSpec(
        "corpus",
        3,
        {"splits": corpus.splits.model_dump(), "seed": corpus.seed, "in_place": dumped},
        {"generated": generated.digest, **digests},
    )

    def build(out: Path) -> Metrics:
        asked = read_selection(generated.path).texts
        chosen = split_questions(asked, corpus.splits, corpus.seed)
        metrics: Metrics = {}
        for split in SPLITS:
            rows = (row for row in iter_rows(generated.path) if chosen[row.question] == split)
            write_rows(out / f"{split}.jsonl", map(asdict, rows))
            metrics[f"questions_{split}"] = float(chosen.count(split))
        write_json(out / _RECORD, {"sources": dumped, "files": digests})
        return metrics

    return run_stage(root, spec, build)


def _check_unchanged(corpus: Artifact, config: Corpus) -> None:
    """Refuse files of the user's own that changed since the corpus stage recorded them."""
    if isinstance(config, DocstringCorpus | MixtureCorpus):
        return
    record = read_json(corpus.path / _RECORD)
    if not isinstance(record, dict) or record["files"] != file_digests(_in_place(config)):
        raise changed_files("they changed since the corpus stage")


def changed_files(value: str) -> CorpusError:
    """Return the error of files that changed while they were needed."""
    return CorpusError(
        "the corpus files must stay as they are while the pipeline runs",
        value,
        "Run the same command again.",
    )


def task_stage(root: Path, corpus: Artifact, sizes: TaskSizes, task: str) -> Artifact:
    """Write the questions of a task: of the corpus's documents, or the task's own."""
    own_task = TASKS.find(task)
    inputs = dict(own_task.sources()) if own_task.corpus is None else {"corpus": corpus.digest}
    spec = StageSpec("task", 1, sizes.model_dump() | own_task.key(), inputs)

    def build(out: Path) -> Metrics:
        wanted = {split: getattr(sizes, split) for split in own_task.splits}
        own_task.write(out, wanted, None if own_task.corpus is None else corpus.path)
        return {}

    return run_stage(root, spec, build)


def task_of(questions: Artifact) -> TaskSet:
    """Return the task whose questions the stage ``task`` wrote."""
    return TASKS.find(questions.manifest()["config"].get("task", DEFAULT_TASK))


def form_of(questions: Artifact) -> QuestionForm:
    """Return how an artifact's questions are asked, and what of them is merged."""
    form = questions.manifest()["config"].get("form")
    return TASKS.find(DEFAULT_TASK).form if form is None else QuestionForm(**form)


def form_key(questions: Artifact) -> dict[str, object]:
    """Return what of a task is part of the keys of stages that train on it or score it."""
    return {k: v for k, v in questions.manifest()["config"].items() if k in ("task", "form")}


def tokenize_stage(
    root: Path,
    lease: ClusterLease,
    corpus: Artifact,
    config: Corpus,
    backbone: str,
    revision: str | None = None,
) -> Artifact:
    """Tokenise every split once per tokenizer: a folder ``<split>/`` of token files each."""
    tokenizer = load_tokenizer(backbone, revision=revision)
    reference = TokenizerRef(backbone, revision, tokenizer_fingerprint(tokenizer))
    spec = StageSpec(
        "tokenize",
        3,
        {"tokenizer": reference.fingerprint, "train_tokens": config.train_tokens},
        {"corpus": corpus.digest},
    )

    def build(out: Path) -> Metrics:
        _check_unchanged(corpus, config)
        splits = {
            split: split_jobs(
                split,
                source,
                out / split,
                reference,
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
            highest = max(part.max_id for part in done.parts)
            if highest >= len(tokenizer):
                raise CorpusError(
                    f"ids of split {split!r} must lie in 0..{len(tokenizer) - 1}, the vocabulary",
                    highest,
                    "Name the tokenizer that made them.",
                )
            metrics[f"tokens_{split}"] = float(done.tokens)
            metrics[f"bad_rows_{split}"] = float(done.bad.count)
        _check_unchanged(corpus, config)  # what was read is what the key names
        return metrics

    return run_stage(root, spec, build)


def _sources(corpus: Artifact, config: Corpus) -> dict[str, Source]:
    names: tuple[str, ...] = ()
    if isinstance(config, DocstringCorpus):
        names = (*SPLITS, *DOCSTRING_OOD)
    elif isinstance(config, GeneratedCorpus):
        names = SPLITS
    elif isinstance(config, MixtureCorpus):
        names = (*SPLITS, *(f"{PART}{name}" for name in config.parts))
    written: dict[str, Source] = {split: _written(corpus, split) for split in names}
    return written | _in_place(config)


def _written(corpus: Artifact, split: str) -> JsonLines:
    """Return a split's file; docstrings show NUL characters on purpose, models by chance."""
    return JsonLines(paths=(str(corpus.path / f"{split}.jsonl"),), nul="keep")


def _in_place(config: Corpus) -> dict[str, Source]:
    """Return the sources of the user's own, by split."""
    if isinstance(config, DocstringCorpus | MixtureCorpus):
        return {}
    sources: dict[str, Source] = {}
    if isinstance(config, FilesCorpus):
        sources = {"train": config.train, "valid": config.valid, "test": config.test}
    return sources | {f"{OOD}{name}": source for name, source in config.out_of_domain.items()}


def tokens(artifact: Artifact, split: str) -> TokenFiles:
    """Return a split's token ids, read where they are asked for."""
    return TokenFiles.open(artifact.path / split)


def splits_with(artifact: Artifact, prefix: str) -> list[str]:
    """Return the splits of a tokenised corpus with a prefix: ``OOD``, or ``PART`` of a mixture."""
    return sorted(path.parent.name for path in artifact.path.glob(f"{prefix}*/{INDEX}"))


def mixture_stage(root: Path, corpus: MixtureCorpus, docstrings: Artifact | None) -> Artifact:
    """Write ``train``, ``valid`` and ``test`` of all parts together, and ``part_<name>`` of each.

    A part's own split holds its test documents whole and in order. ``mixture.json`` records the
    SHA-256 of every file that was read, the licences and the sizes.
    """
    digests = _file_digests(corpus)
    inputs = {} if docstrings is None else {"docstrings": docstrings.digest}
    for (name, split), own in digests.items():
        inputs |= {f"{name}.{split}:{number}": digest for number, digest in enumerate(own)}
    config = corpus.model_dump(mode="json", exclude={"train_tokens"})

    def build(out: Path) -> Metrics:
        metrics: Metrics = {}
        sizes: dict[str, dict[str, object]] = {name: {} for name in corpus.parts}
        for split in SPLITS:
            texts = {name: _texts(corpus, name, split, docstrings) for name in corpus.parts}
            mixed = mix_documents(
                texts,
                out / f"{split}.jsonl",
                seed=corpus.seed,
                max_characters=corpus.max_characters,
            )
            for name, size in mixed.items():
                sizes[name][split] = vars(size)
                metrics[f"documents_{split}_{name}"] = float(size.documents)
                metrics[f"characters_{split}_{name}"] = float(size.characters)
        for name in corpus.parts:
            rows = ({"text": text} for text in _texts(corpus, name, "test", docstrings))
            write_rows(out / f"{PART}{name}.jsonl", rows)
        if _file_digests(corpus) != digests:
            raise changed_files("they changed while they were mixed")
        records = {name: _record(corpus, name, docstrings, digests) for name in corpus.parts}
        write_json(out / RECORD, {n: record | {"sizes": sizes[n]} for n, record in records.items()})
        return metrics

    return run_stage(root, StageSpec("mixture", 1, config, inputs), build)


def _file_digests(corpus: MixtureCorpus) -> dict[tuple[str, Split], list[str]]:
    """Return the digests of the user's files by part and split."""
    return {
        (name, split): _digests(name, part, split)
        for name, part in corpus.parts.items()
        if isinstance(part, TextPart)
        for split in SPLITS
    }


def _digests(name: str, part: TextPart, split: Split) -> list[str]:
    try:
        return part.source(split).digests()
    except CorpusError as error:
        raise CorpusError(
            f"part {name!r} of the corpus needs its {split} documents: {error.rule}",
            error.value,
            f"Correct corpus.parts.{name}.{split}, or run the command in the folder that its "
            f"relative paths start from; here they start from {Path.cwd()}.",
        ) from error


def _texts(
    corpus: MixtureCorpus, name: str, split: Split, docstrings: Artifact | None
) -> Iterator[str]:
    part = corpus.parts[name]
    if isinstance(part, TextPart):
        return iter_documents(part.source(split))
    if docstrings is None:
        raise CorpusError(
            "a part of docstrings needs the embedded corpus", "none", "Run its corpus stage first."
        )
    return iter_documents(_written(docstrings, split))


def _record(
    corpus: MixtureCorpus,
    name: str,
    docstrings: Artifact | None,
    digests: Mapping[tuple[str, Split], list[str]],
) -> dict[str, object]:
    """Return a part's licence, and its files with their digests."""
    part = corpus.parts[name]
    files: object = {} if docstrings is None else {"docstrings": docstrings.digest}
    if isinstance(part, TextPart):
        files = {
            split: dict(zip(_names(part.source(split)), digests[name, split], strict=True))
            for split in SPLITS
        }
    return {"kind": part.kind, "licence": part.licence, "files": files}


def _names(source: DocumentSource) -> list[str]:
    if isinstance(source, HubDataset):
        return [f"{source.name} {source.split}"]
    return [str(file) for file in source.files()]
