"""The corpora of a recipe: docstrings, files of one's own, or text that a model generates."""

from __future__ import annotations

import math
from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from umim_core.config.model_base import Model
from umim_core.embedded.docstring_corpus import OUT_OF_DOMAIN_PACKAGES, TRAINING_PACKAGES
from umim_core.text.sources import DocumentSource, Source

QUESTION_FIELD: Final = "{question}"
TrainTokens = Annotated[int, Field(ge=1)] | None
SplitFraction = Annotated[float, Field(gt=0.0, lt=1.0)]
QuestionSource = Annotated[DocumentSource, Field(discriminator="kind")]


class DocstringCorpus(Model):
    """The embedded corpus: docstrings of the installed Python stack."""

    kind: Literal["docstrings"] = "docstrings"
    packages: Annotated[tuple[str, ...], Field(min_length=1)] = Field(
        TRAINING_PACKAGES, description="Packages whose docstrings make train, valid and test."
    )
    out_of_domain: tuple[str, ...] = Field(
        OUT_OF_DOMAIN_PACKAGES, description="Packages of the out-of-domain split ood_math."
    )
    train_tokens: TrainTokens = Field(
        default=None, description="Use only the first so many training tokens; null takes all."
    )


class FilesCorpus(Model):
    """A corpus of the user's own, one source per split."""

    kind: Literal["files"] = "files"
    train: Source
    valid: Source
    test: Source
    out_of_domain: dict[str, Source] = Field(
        default_factory=dict, description="Further test corpora by name."
    )
    train_tokens: TrainTokens = Field(
        default=None, description="Use only the first so many training tokens; null takes all."
    )


class SplitFractions(Model):
    """Share of the questions in each split; all trajectories of a question go with it."""

    train: SplitFraction = 0.9
    valid: SplitFraction = 0.05
    test: SplitFraction = 0.05

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
    questions: Annotated[tuple[QuestionSource, ...], Field(min_length=1)] = Field(
        description="Where the questions are; a document of a source is a question."
    )
    model: Annotated[str, Field(min_length=1)] = Field(
        description="What answers: embedded name, directory or hub repository."
    )
    revision: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="Data type of the model's weights while it samples."
    )
    trajectories: Annotated[int, Field(ge=1, le=1024, description="Answers per question.")] = 3
    top_p: Annotated[float, Field(gt=0.0, le=1.0, description="Mass of the nucleus.")] = 0.7
    temperature: Annotated[float, Field(gt=0.0, le=100.0, description="Divides the logits.")] = 1.0
    max_tokens: Annotated[
        int, Field(ge=2, le=1 << 20, description="Tokens of prompt and answer at most.")
    ] = 2048
    max_question_tokens: Annotated[
        int, Field(ge=1, description="Longer questions, in tokens, are left out and counted.")
    ] = 200
    template: str = Field(
        QUESTION_FIELD, description="What is asked; {question} stands for the question."
    )
    chat: Literal["none", "template"] = Field(
        "none", description="Ask it as it is, or as a user's turn by the tokenizer's chat template."
    )
    splits: SplitFractions = SplitFractions()
    batch_size: Annotated[int, Field(ge=1, description="Questions that are answered together.")] = (
        16
    )
    shard_questions: Annotated[
        int, Field(ge=1, description="Questions per shard; a run that dies resumes with the next.")
    ] = 256
    seed: Annotated[int, Field(ge=0, lt=2**31, description="Of the answers and the splits.")] = 0
    out_of_domain: dict[str, Source] = Field(
        default_factory=dict, description="Further test corpora by name."
    )
    train_tokens: TrainTokens = Field(
        default=None, description="Use only the first so many training tokens; null takes all."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if QUESTION_FIELD not in self.template:
            raise ValueError(f"template must contain {QUESTION_FIELD}")
        if self.max_question_tokens >= self.max_tokens:
            raise ValueError(
                "max_question_tokens must be below max_tokens, to leave an answer room"
            )
        return self


Corpus = DocstringCorpus | FilesCorpus | GeneratedCorpus
