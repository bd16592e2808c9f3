"""Options of mining, checked before anything heavy is imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from umim_core.errors import ConfigError
from umim_core.rules.grams import LONGEST, check_longest, check_tau
from umim_core.rules.origin import Containment, Overlap, RuleOrigin


@dataclass(frozen=True)
class MiningOptions:
    """Options of mining rules, from the command or recipe to the counting kernel.

    Attributes:
        tau: Least count.
        segment_length: Tokens per segment; n-grams cross no border, the remainder is dropped.
        rule_budget: Most rules; tau is raised until they fit. None for no limit.
        spans: Keep so many n-grams by the tokens that they save (``choose_spans``); they pass no
            filter. None keeps all rules.
        min_documents: Least number of documents that a rule occurs in.
        protect: Regular expressions of tokens that no rule may contain, or names such as "digits".
        threads: Threads; None takes one per core.
        max_memory_gib: Refuse to count where that may take more memory; None for no limit.
        longest: Most tokens of a rule, 4 to 16.
    """

    tau: int = 5
    segment_length: int = 512
    overlap: Overlap = "greedy"
    containment: Containment = "drop"
    rule_budget: int | None = None
    spans: int | None = None
    min_documents: int = 1
    protect: tuple[str, ...] = ()
    threads: int | None = None
    max_memory_gib: float | None = None
    longest: int = LONGEST

    def check(self) -> Self:
        """Return the options if they are within their bounds."""
        check_tau(self.tau)
        check_longest(self.longest)
        for name, least in (
            ("segment_length", 2),
            ("rule_budget", 1),
            ("spans", 1),
            ("min_documents", 1),
            ("threads", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} must be at least {least}", value, "Raise it.")
        unfiltered = (self.overlap, self.containment) == ("none", "keep")
        if self.spans is not None and not (unfiltered and self.rule_budget is None):
            raise ConfigError(
                "spans are chosen among all n-grams: overlap none, containment keep, no budget",
                f"{self.overlap}, {self.containment}, {self.rule_budget}",
                "Leave spans out, or these three.",
            )
        return self

    @property
    def count_documents(self) -> bool:
        """Whether the documents in which an n-gram occurs are counted."""
        return self.min_documents > 1

    def origin(self, tokenizer_fingerprint: str | None, corpus_digest: str) -> RuleOrigin:
        """Return what is recorded with rules that are mined so."""
        return RuleOrigin(
            tau=self.tau,
            overlap=self.overlap,
            containment=self.containment,
            segment_length=self.segment_length,
            tokenizer_fingerprint=tokenizer_fingerprint,
            corpus_digest=corpus_digest,
            min_documents=self.min_documents if self.count_documents else None,
            protect=self.protect,
        )
