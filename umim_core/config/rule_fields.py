"""Rules in a recipe: counted n-grams, a model's confidence, or a directory of them.

==============  ===============================  =============================================
field           ``source: frequency``            ``source: confidence``
==============  ===============================  =============================================
tau             least count of an n-gram         least count of a run
overlap         ``greedy`` by default            ``none``: the paper filters no runs
containment     ``drop`` by default              ``keep``: likewise
rule_budget     most rules                       refused
spans           n-grams that save the most       refused
==============  ===============================  =============================================

A cell that names a rule directory (``rules``) has none of these: nothing is mined for it.

Source: paper, "Merge-Rule Mining Details" and "Alternative Merge-Rule Construction".
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from umim_core.config.model_base import Model

CellSource = Literal["frequency", "confidence"]
_AS_FOUND = {"overlap": "none", "containment": "keep"}


class RulesConfig(Model):
    """Options of mining rules."""

    tau: Annotated[int, Field(ge=1, description="Least count of a rule.")] = 5
    overlap: Literal["greedy", "none"] = "greedy"
    containment: Literal["drop", "keep"] = "drop"
    rule_budget: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Most rules; tau is raised until they fit. null: no limit."
    )


class CellRules(RulesConfig):
    """Rules of one cell; the module's table says which fields go together."""

    rules: Annotated[str | None, Field(min_length=1)] = Field(
        None, description="Rule directory that umim mine wrote; then nothing is mined."
    )
    spans: Annotated[int | None, Field(ge=1)] = Field(
        None, description="Keep so many n-grams by the tokens that they save, without filters."
    )
    source: CellSource = Field(
        "frequency", description="Frequent n-grams, or spans the backbone is confident about."
    )
    min_probability: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(
        0.5, description="Probability that every token of a confident span exceeds."
    )
    confidence_tokens: Annotated[int | None, Field(ge=1)] = Field(
        None, description="Ask the backbone about so many training tokens only; null takes all."
    )

    @model_validator(mode="before")
    @classmethod
    def _as_found(cls, raw: object) -> object:
        """Give confidence rules and chosen spans their form where none is named: no filters."""
        if isinstance(raw, dict) and (raw.get("source") == "confidence" or raw.get("spans")):
            return _AS_FOUND | raw
        return raw

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.rules is not None:
            for name, field in CellRules.model_fields.items():
                if name != "rules" and getattr(self, name) != field.default:
                    raise ValueError(f"{name} belongs to mining, rules are given; leave it out")
            return self
        unfiltered = {"overlap": self.overlap, "containment": self.containment} == _AS_FOUND
        if self.spans is not None and not (
            unfiltered and self.source == "frequency" and self.rule_budget is None
        ):
            raise ValueError(
                "spans are chosen among all frequent n-grams: leave overlap, containment, source "
                "and rule_budget out"
            )
        if self.source == "frequency":
            for name in ("min_probability", "confidence_tokens"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"{name} belongs to source 'confidence'; leave it out")
        else:
            for name, value in _AS_FOUND.items():
                if getattr(self, name) != value:
                    raise ValueError(
                        f"confidence rules are taken as they are found: {name} must be {value!r}; "
                        "leave it out"
                    )
            if self.rule_budget is not None:
                raise ValueError("confidence rules know no rule_budget; raise tau instead")
        return self

    def check_recipe(self, segment_length: int, min_documents: int) -> None:
        """Refuse confidence rules in a recipe whose other fields they cannot follow."""
        if self.source == "confidence" and min_documents > 1:
            raise ValueError("confidence rules know no mining.min_documents; raise tau instead")
        if self.confidence_tokens is not None and self.confidence_tokens < segment_length:
            raise ValueError(
                f"confidence_tokens must be at least segment_length, {segment_length}; raise it"
            )
