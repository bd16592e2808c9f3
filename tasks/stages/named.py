"""Names that stages are given: in their keys stands what a name means on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from pydantic import BaseModel
from transformers import PreTrainedTokenizerBase

from tasks.run.stage import Artifact, Digest
from umim_core.backbone.tokenizer_files import (
    backbone_identity,
    load_tokenizer,
    special_ids,
    tokenizer_fingerprint,
)
from umim_core.baselines.registry import own_model
from umim_core.checkpoint.checkpoint_files import read_config, resolve_checkpoint
from umim_core.config.corpus import GeneratedCorpus
from umim_core.config.model_base import Split
from umim_core.errors import CorpusError, require
from umim_core.rules.ruleset import RuleSet
from umim_core.store.artifacts import directory_digest, json_digest
from umim_core.task_sets.spec import TASKS, QuestionForm
from umim_core.text.sources import (
    HubDataset,
    JsonLines,
    ParquetFiles,
    Source,
    TextFiles,
    TokenIds,
    file_digests,
)


@dataclass(frozen=True)
class NamedTokenizer:
    """The tokenizer of a backbone: which ids a text gets, and which of them are special."""

    name: str
    revision: str | None = None

    @cached_property
    def loaded(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.name, revision=self.revision)

    @cached_property
    def fingerprint(self) -> str:
        return tokenizer_fingerprint(self.loaded)

    def identity(self) -> Digest:
        return _digest([self.fingerprint, sorted(special_ids(self.loaded))])


@dataclass(frozen=True)
class NamedBackbone:
    name: str
    revision: str | None = None

    @cached_property
    def tokenizer(self) -> NamedTokenizer:
        return NamedTokenizer(self.name, self.revision)

    def identity(self) -> Digest:
        weights = backbone_identity(self.name, self.revision)
        return _digest([weights, self.tokenizer.identity()])


@dataclass(frozen=True)
class NamedCheckpoint:
    """A checkpoint.

    Where a ``backbone`` lies that the checkpoint names otherwise does not count: it must have the
    checkpoint's fingerprint, which does.
    """

    place: Path | str
    backbone: str | None = None

    @cached_property
    def directory(self) -> Path:
        return resolve_checkpoint(self.place).resolve()

    def identity(self) -> Digest:
        return Digest(directory_digest(self.directory))


@dataclass(frozen=True)
class NamedBase(NamedCheckpoint):
    """The backbone of a checkpoint: the same one for every checkpoint of it, in plans, too."""

    place: Path | str = field(compare=False)
    revision: str | None = None

    def identity(self) -> Digest:
        return Digest(read_config(self.directory).backbone_fingerprint)


@dataclass(frozen=True)
class NamedRules:
    place: str

    def identity(self) -> Digest:
        return Digest(RuleSet.load(self.place).digest)


@dataclass(frozen=True)
class NamedMethod:
    """A baseline, with the model of its own that it chooses by now, if it has one."""

    name: str

    @cached_property
    def model(self) -> str | None:
        return own_model(self.name)

    def identity(self) -> dict[str, str | None]:
        return {"name": self.name, "model": self.model}


@dataclass(frozen=True)
class NamedTask:
    """A task by its name: how it asks, and what it reads where no corpus is given."""

    name: str

    def identity(self) -> dict[str, object]:
        task = TASKS.find(self.name)
        sources = task.sources() if task.corpus is None else []
        read = {name: Digest(version) for name, version in sources}
        return {**task.key(), "sources": read}


@dataclass(frozen=True)
class ReadFiles:
    """Sources that are read where they lie, by name: the content of every file counts."""

    sources: Mapping[str, Source]

    @cached_property
    def digests(self) -> dict[str, str]:
        """SHA-256 of every file by ``<source>:<number>``."""
        return file_digests(self.sources)

    def identity(self) -> dict[str, Digest]:
        return {name: Digest(digest) for name, digest in self.digests.items()}

    def check_unchanged(self, when: str, known: object = None) -> None:
        """Refuse files that are not what is known of them, or what they were when first read."""
        same = file_digests(self.sources) == (self.digests if known is None else known)
        rule = "the corpus files must stay as they are while the pipeline runs"
        require(same, CorpusError, rule, when, "Run the same command again.")


_PLACES: Mapping[type[BaseModel], tuple[str, ...]] = {
    TextFiles: ("paths",),
    JsonLines: ("paths",),
    ParquetFiles: ("paths",),
    TokenIds: ("path",),
    HubDataset: ("revision",),
    GeneratedCorpus: ("model", "revision"),
}


def without_places(config: object) -> object:
    """Return a corpus as plain data without names of files and models, whose content counts."""
    if isinstance(config, BaseModel):
        places = _PLACES.get(type(config), ())
        if isinstance(config, HubDataset) and config.folder is not None:
            places += ("name",)
        named = {name: getattr(config, name) for name in type(config).model_fields}
        return {k: without_places(v) for k, v in named.items() if k not in places}
    if isinstance(config, Mapping):
        return {name: without_places(value) for name, value in config.items()}
    return [*map(without_places, config)] if isinstance(config, list | tuple) else config


@dataclass(frozen=True)
class Questions:
    """The questions of a task that another stage wrote: splits that are read, and how it asks."""

    artifact: Artifact
    splits: tuple[Split, ...] = ("train", "valid", "test")

    @cached_property
    def _task(self) -> dict[str, object]:
        task: dict[str, object] = self.artifact.manifest()["config"]["task"]
        return task

    @property
    def form(self) -> QuestionForm:
        """How they are asked, and what of them is merged."""
        return QuestionForm(**self._task["form"])  # type: ignore[arg-type]  # as it was recorded

    def file(self, split: Split) -> Path:
        return self.artifact.path / f"{split}.jsonl"

    def identity(self) -> dict[str, object]:
        return self._task | {split: self.artifact.part(f"{split}.jsonl") for split in self.splits}


def _digest(parts: list[object]) -> Digest:
    return Digest(json_digest(parts))
