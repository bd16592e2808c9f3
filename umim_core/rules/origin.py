"""Origin of a rule set: its threshold, filters, tokenizer and corpus."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Strict

Overlap = Literal["greedy", "none"]
Containment = Literal["drop", "keep"]
RuleSource = Literal["frequency", "confidence", "explicit"]
NOT_OF_THE_DIGEST: Final = {
    *("protect", "min_probability", "max_damage", "price_steps", "price_reductions"),
}
"""What is known of rules besides, or is found out later: the same rules have the same digest."""


class RuleOrigin(BaseModel):
    """Origin of rules, as the manifest of a rule directory records it.

    Attributes:
        tau: Least count of a rule, or None (rules not made by a threshold).
        segment_length: Tokens per segment when counting, or None (ragged segments).
        tokenizer_fingerprint: Of the tokenizer whose ids these are, or None (unknown).
        corpus_digest: SHA-256 of the token ids counted, or None.
        source: What made them rules: counts, a language model's confidence, or a list of spans.
        min_documents: Least number of documents that a rule occurs in, or None (not asked for).
        protect: Patterns of tokens that no rule contains.
        min_probability: What a model gave every token of a confident span, or None.
        max_damage: Most price of a rule: estimated nats of KL per occurrence, over the tokens that
            one saves; None (not pruned by damage).
        price_steps: Prices, rising, for which the next field has the token reduction; empty where
            rules have no prices.
        price_reductions: Token reduction of held-out text by the rules of at most each price.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    tau: int | None = None
    overlap: Overlap = "greedy"
    containment: Containment = "drop"
    segment_length: int | None = None
    tokenizer_fingerprint: str | None = None
    corpus_digest: str | None = None
    source: RuleSource = "frequency"
    min_documents: int | None = None
    protect: Annotated[tuple[str, ...], Strict(False)] = ()
    min_probability: float | None = None
    max_damage: float | None = None
    price_steps: Annotated[tuple[float, ...], Strict(False)] = ()
    price_reductions: Annotated[tuple[float, ...], Strict(False)] = ()
