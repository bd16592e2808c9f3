"""Stage ``mixture``: several corpora in one, their documents mixed, each one's test split kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from tasks.run.stage import Artifact, Metrics, StageSpec, run_stage
from tasks.stages.corpus import PART, changed_files
from umim_core.config.corpus import SPLITS, DocstringPart, MixtureCorpus, Split, TextPart
from umim_core.embedded.documents import write_rows
from umim_core.errors import CorpusError
from umim_core.store.artifacts import write_json
from umim_core.text.files import expand
from umim_core.text.mixing import mix_documents
from umim_core.text.readers import iter_documents
from umim_core.text.sources import DocumentSource, HubDataset, JsonLines, source_digests

RECORD: Final = "mixture.json"


def mixture_stage(root: Path, corpus: MixtureCorpus, docstrings: Artifact | None) -> Artifact:
    """Write ``train``, ``valid`` and ``test`` of all parts together, and ``part_<name>`` of each.

    A part's own split holds its test documents whole and in order. ``mixture.json`` records the
    SHA-256 of every file that was read, the licences and the sizes.

    Raises:
        CorpusError: If a file of a part is missing or unreadable; part, file and remedy are named.
            If one changes while it is read.
    """
    digests = _file_digests(corpus)
    corpora = {} if docstrings is None else {"docstrings": docstrings.digest}
    spec = StageSpec(
        "mixture",
        1,
        corpus.model_dump(mode="json", exclude={"train_tokens"}),
        corpora | _numbered(digests),
    )

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

    return run_stage(root, spec, build)


def _file_digests(corpus: MixtureCorpus) -> dict[tuple[str, Split], list[str]]:
    """Return the digests of the user's files by part and split."""
    return {
        (name, split): _digests(name, part, split)
        for name, part in corpus.parts.items()
        if isinstance(part, TextPart)
        for split in SPLITS
    }


def _numbered(digests: Mapping[tuple[str, Split], list[str]]) -> dict[str, str]:
    return {
        f"{name}.{split}:{number}": digest
        for (name, split), shard_digests in digests.items()
        for number, digest in enumerate(shard_digests)
    }


def _digests(name: str, part: TextPart, split: Split) -> list[str]:
    try:
        return source_digests(part.source(split))
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
    return iter_documents(_source(corpus.parts[name], split, docstrings))


def _source(
    part: TextPart | DocstringPart, split: Split, docstrings: Artifact | None
) -> DocumentSource:
    if isinstance(part, TextPart):
        return part.source(split)
    if docstrings is None:
        raise CorpusError(
            "a part of docstrings needs the embedded corpus", "none", "Run its corpus stage first."
        )
    # Docstrings show NUL characters on purpose.
    return JsonLines(paths=(str(docstrings.path / f"{split}.jsonl"),), nul="keep")


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
    return [str(file) for file in expand(source.paths)]
