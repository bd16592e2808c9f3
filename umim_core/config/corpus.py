"""The corpora of a recipe: docstrings, files of one's own, a mixture of them, or generated text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from umim_core.config.model_base import SPLITS, AtLeast1, Model, Seed, Split
from umim_core.embedded.docstring_corpus import OUT_OF_DOMAIN_PACKAGES, TRAINING_PACKAGES
from umim_core.text.sources import DocumentSource, Source

OOD: Final = "ood_"  # before the name of an out-of-domain split
QUESTION_FIELD: Final = "{question}"
TrainTokens = Annotated[
    AtLeast1 | None,
    Field(description="Use only the first so many training tokens; null takes all."),
]
OutOfDomain = Annotated[
    dict[str, Source], Field(default_factory=dict, description="Further test corpora by name.")
]
SplitFraction = Annotated[float, Field(gt=0.0, lt=1.0)]
DocumentsOf = Annotated[DocumentSource, Field(discriminator="kind")]
PartName = Annotated[str, Field(pattern=r"^[a-z0-9_]+$", max_length=32)]
Licence = Annotated[str, Field(description="Licence of its text, for the checkpoint's card.")]


def _named_apart(sources: Mapping[str, Source]) -> dict[str, Source]:
    return {f"{OOD}{name}": source for name, source in sources.items()}


class DocstringCorpus(Model):
    """The embedded corpus: docstrings of the installed Python stack."""

    kind: Literal["docstrings"] = "docstrings"
    packages: Annotated[tuple[str, ...], Field(min_length=1)] = TRAINING_PACKAGES
    """Packages whose docstrings make train, valid and test."""
    out_of_domain: tuple[str, ...] = OUT_OF_DOMAIN_PACKAGES
    """Packages of the out-of-domain split ood_math."""
    train_tokens: TrainTokens = None

    def sources(self) -> dict[str, Source]:
        """Return nothing: it is made of installed packages."""
        return {}


class FilesCorpus(Model):
    """A corpus of the user's own, one source per split."""

    kind: Literal["files"] = "files"
    train: Source
    """Rules are mined here, and modules trained."""
    valid: Source
    """Decides when a training ends, and which weights are kept."""
    test: Source
    """Measured at the end, and nowhere else."""
    out_of_domain: OutOfDomain
    train_tokens: TrainTokens = None

    def sources(self) -> dict[str, Source]:
        """Return what is read in place, by split."""
        own: dict[str, Source] = {split: getattr(self, split) for split in SPLITS}
        return own | _named_apart(self.out_of_domain)


class TextPart(Model):
    """A part of a mixture: documents of the user's own, one source per split."""

    kind: Literal["files"] = "files"
    licence: Licence = ""
    train: DocumentsOf
    """Documents of the mixture's train split."""
    valid: DocumentsOf
    """Documents of its valid split."""
    test: DocumentsOf
    """Documents of its test split, also measured alone."""

    def source(self, split: Split) -> DocumentSource:
        """Return the documents of one split."""
        source: DocumentSource = getattr(self, split)
        return source


class DocstringPart(Model):
    """A part of a mixture: train, valid and test of the embedded corpus."""

    kind: Literal["docstrings"] = "docstrings"
    licence: Licence = ""


class MixtureCorpus(Model):
    """Several corpora in one: every split has the documents of all parts in a mixed order.

    Each part's test split is also measured on its own.
    """

    kind: Literal["mixture"] = "mixture"
    parts: Annotated[
        dict[PartName, Annotated[TextPart | DocstringPart, Field(discriminator="kind")]],
        Field(min_length=1),
    ]
    """Parts by name; one of docstrings at most."""
    seed: Seed = 0
    """Of the mixed order."""
    max_characters: AtLeast1 = 4096
    """Longer documents are cut, at line ends, before they mix."""
    train_tokens: TrainTokens = None

    def sources(self) -> dict[str, Source]:
        """Return what is read of its parts, by ``<part>.<split>``."""
        own = {name: part for name, part in self.parts.items() if isinstance(part, TextPart)}
        return {f"{name}.{split}": own[name].source(split) for name in own for split in SPLITS}

    @property
    def docstrings(self) -> DocstringCorpus | None:
        """The embedded corpus, if a part is made of it."""
        has_docstrings = any(isinstance(part, DocstringPart) for part in self.parts.values())
        return DocstringCorpus() if has_docstrings else None

    @model_validator(mode="after")
    def _docstrings_once(self) -> Self:
        if sum(isinstance(part, DocstringPart) for part in self.parts.values()) > 1:
            raise ValueError("parts: the embedded corpus must be one part at most")
        return self


class SplitFractions(Model):
    """Share of the questions in each split; all trajectories of a question go with it."""

    train: SplitFraction = 0.9
    """Share to train on."""
    valid: SplitFraction = 0.05
    """Share to validate on."""
    test: SplitFraction = 0.05
    """Share to measure on."""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if not math.isclose(self.train + self.valid + self.test, 1.0, abs_tol=1e-9):
            raise ValueError("train, valid and test must add up to 1")
        return self


class GeneratedCorpus(Model):
    """Questions with the trajectories that a language model samples for them.

    The defaults are the paper's for its maths corpus. A document is one question with one sampled
    answer. Unlike the paper's, which share out sequences, splits share out questions: a question's
    trajectories never straddle them.
    """

    kind: Literal["generated"] = "generated"
    questions: Annotated[tuple[DocumentsOf, ...], Field(min_length=1)]
    """Where the questions are; a document of a source is a question."""
    model: Annotated[str, Field(min_length=1)]
    """What answers: embedded name, directory or hub repository."""
    revision: str | None = None
    """Hub revision of the model."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Data type of the model's weights while it samples."""
    trajectories: Annotated[int, Field(ge=1, le=1024)] = 3
    """Answers per question."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 0.7
    """Mass of the nucleus."""
    temperature: Annotated[float, Field(gt=0.0, le=100.0)] = 1.0
    """Divides the logits."""
    max_tokens: Annotated[int, Field(ge=2, le=1 << 20)] = 2048
    """Tokens of prompt and answer at most."""
    max_question_tokens: AtLeast1 = 200
    """Longer questions, in tokens, are left out and counted."""
    template: str = QUESTION_FIELD
    """What is asked; {question} stands for the question."""
    chat: Literal["none", "template"] = "none"
    """Ask it as it is, or as a user's turn by the tokenizer's chat template."""
    splits: SplitFractions = SplitFractions()
    batch_size: AtLeast1 = 16
    """Questions that are answered together."""
    shard_questions: AtLeast1 = 256
    """Questions per shard; a run that dies resumes with the next."""
    seed: Seed = 0
    """Of the answers and the splits."""
    out_of_domain: OutOfDomain
    train_tokens: TrainTokens = None

    def sources(self) -> dict[str, Source]:
        """Return what is read in place, by split; the others are written."""
        return _named_apart(self.out_of_domain)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if QUESTION_FIELD not in self.template:
            raise ValueError(f"template must contain {QUESTION_FIELD}")
        if self.max_question_tokens >= self.max_tokens:
            raise ValueError(
                "max_question_tokens must be below max_tokens, to leave an answer room"
            )
        return self


Corpus = DocstringCorpus | FilesCorpus | GeneratedCorpus | MixtureCorpus


def corpus_kinds(corpus: Corpus) -> tuple[str, ...]:
    """Return the kinds of corpus that a task may be made from: its own, and that of its parts."""
    if isinstance(corpus, MixtureCorpus) and corpus.docstrings is not None:
        return (corpus.kind, corpus.docstrings.kind)
    return (corpus.kind,)
