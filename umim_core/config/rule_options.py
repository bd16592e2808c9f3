"""Options of rules, from a recipe or command to the counting kernel and a rule directory.

==============  ===============================  =============================================
field           ``source: frequency``            ``source: confidence``
==============  ===============================  =============================================
tau             least count of an n-gram         least count of a run
overlap         ``greedy``; chosen spans: none   as asked; in a recipe ``none``, as in the paper
containment     ``drop``; chosen spans: keep     as asked; in a recipe ``keep``
spans           n-grams that save the most       refused
min_documents   documents an n-gram occurs in    refused
longest         most tokens of an n-gram         refused: runs have 2 to 4
==============  ===============================  =============================================

Rules of ``source`` explicit are a list of spans; nothing was counted for them.

Source: paper, "Merge-Rule Mining Details" and "Alternative Merge-Rule Construction".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from umim_core.config.model_base import AtLeast1, Model, PositiveFloat, validated
from umim_core.errors import ConfigError

Overlap = Literal["greedy", "none"]
Containment = Literal["drop", "keep"]
RuleSource = Literal["frequency", "confidence", "explicit"]
AS_FOUND: Final = {"overlap": "none", "containment": "keep"}


class RuleFilters(Model):
    """The threshold and the filters that make rules of what is counted."""

    tau: AtLeast1 = 5
    """Least count of a rule."""
    overlap: Overlap = "greedy"
    """Overlap filter; of chosen spans none."""
    containment: Containment = "drop"
    """Whether rules inside another go; chosen spans stay."""


class RuleSearch(RuleFilters):
    """How the rules of one cell are found; the module's table says which fields go together."""

    longest: Annotated[int, Field(ge=4, le=16)] = 4
    """Most tokens of a rule; more than 4 pay where text repeats itself."""
    spans: AtLeast1 | None = None
    """Keep so many n-grams by the tokens that they save, without filters."""
    source: RuleSource = "frequency"
    """Frequent n-grams, or spans the backbone is confident about."""
    min_probability: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    """Probability that every token of a confident span exceeds."""
    confidence_tokens: AtLeast1 | None = None
    """Ask the backbone about so many training tokens only; null takes all."""

    @model_validator(mode="before")
    @classmethod
    def _chosen_as_found(cls, raw: object) -> object:
        return AS_FOUND | raw if isinstance(raw, dict) and raw.get("spans") else raw

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        filters = {name: getattr(self, name) for name in AS_FOUND}
        if self.spans is not None and not (filters == AS_FOUND and self.source == "frequency"):
            raise ValueError(
                "spans are chosen among all frequent n-grams: leave overlap, containment and "
                "source out"
            )
        if self.source != "confidence":
            for name in ("min_probability", "confidence_tokens"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"{name} belongs to source 'confidence'; leave it out")
        elif self.longest != type(self).model_fields["longest"].default:
            raise ValueError("confidence rules are runs of 2 to 4 tokens; leave longest out")
        return self


class MiningConfig(Model):
    """Mining options that all rule sets of a recipe share: eligible n-grams and limits of cost."""

    protect: tuple[str, ...] = ()
    """Regular expressions of tokens no rule may contain, or 'digits'."""
    min_documents: AtLeast1 = 1
    """Least number of documents that a rule occurs in."""
    block_tokens: AtLeast1 | None = None
    """Tokens a worker counts at a time; null: by the cluster's size."""
    max_memory_gib: PositiveFloat | None = None
    """Refuse to count if a worker may take more memory."""


class RuleOptions(RuleSearch, MiningConfig):
    """All options of rules; what breaks one of their rules is a ``ConfigError``.

    N-grams cross no border of a segment, and a shorter remainder of the text is dropped. Segments
    of None are those of a task: its questions.
    """

    segment_length: Annotated[int, Field(ge=2)] | None = 512
    """Tokens per segment."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Threads that count. null: one per core."""

    @model_validator(mode="after")
    def _can_be_asked(self) -> Self:
        if self.source == "confidence" and self.min_documents > 1:
            raise ValueError("confidence rules know no min_documents; raise tau instead")
        length = self.segment_length or 0
        if self.confidence_tokens is not None and self.confidence_tokens < length:
            raise ValueError(f"confidence_tokens must be at least segment_length, {length}")
        return self

    @model_validator(mode="wrap")
    @classmethod
    def _typed(cls, raw: object, read: Callable[[object], Self]) -> Self:
        return validated(cls, raw, read=read)

    @property
    def count_documents(self) -> bool:
        """Whether the documents in which an n-gram occurs are counted."""
        return self.min_documents > 1

    @property
    def length(self) -> int:
        """Tokens per segment of text, which is cut."""
        if self.segment_length is None:
            raise ConfigError("segment_length must be given to mine text", None, "Take 512.")
        return self.segment_length


EXPLICIT: Final = RuleOptions(
    source="explicit", tau=1, overlap="none", containment="keep", segment_length=None
)
