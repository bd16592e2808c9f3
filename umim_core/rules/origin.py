"""Origin of a rule set: the options it was made with, its tokenizer, corpus and prices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Self

from pydantic import BaseModel, ConfigDict, Strict

from umim_core.config.rule_options import EXPLICIT, RuleOptions

_OPTIONS: Final = (
    *("tau", "overlap", "containment", "segment_length", "source", "min_documents", "protect"),
    "min_probability",
)
_NOT_ASKED: Final = {"tau", "min_documents", "min_probability"}  # where they are null
_NOT_OF_THE_DIGEST: Final = {
    *("protect", "min_probability", "max_damage", "price_steps", "price_reductions"),
}


class RuleOrigin(BaseModel):
    """Origin of rules, as the manifest of a rule directory records it.

    Attributes:
        options: How they were found; a list of spans, if not said otherwise.
        tokenizer_fingerprint: Of the tokenizer whose ids these are, or None (unknown).
        corpus_digest: SHA-256 of the token ids counted, or None.
        max_damage: Most price of a rule: estimated nats of KL per occurrence, over the tokens that
            one saves; None (not pruned by damage).
        price_steps: Prices, rising, for which the next field has the token reduction; empty where
            rules have no prices.
        price_reductions: Token reduction of held-out text by the rules of at most each price.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    options: RuleOptions = EXPLICIT
    tokenizer_fingerprint: str | None = None
    corpus_digest: str | None = None
    max_damage: float | None = None
    price_steps: Annotated[tuple[float, ...], Strict(False)] = ()
    price_reductions: Annotated[tuple[float, ...], Strict(False)] = ()

    def with_options(self, changes: Mapping[str, object]) -> Self:
        """Return the same origin with other options, which are known to go together."""
        return self.model_copy(update={"options": self.options.model_copy(update=dict(changes))})

    def record(self) -> dict[str, object]:
        """Return what a manifest holds: null for an option that nobody asked for."""
        options = self.options
        null_unless_asked = {
            "tau": None if options.source == "explicit" else options.tau,
            "min_documents": options.min_documents if options.count_documents else None,
            "min_probability": options.min_probability if options.source == "confidence" else None,
        }
        described = options.model_dump(mode="json", include=set(_OPTIONS)) | null_unless_asked
        return described | self.model_dump(mode="json", exclude={"options"})

    def digest_record(self) -> dict[str, object]:
        """Return the part of the record that tells rules apart; the rest may be found out later."""
        return {name: x for name, x in self.record().items() if name not in _NOT_OF_THE_DIGEST}

    @classmethod
    def of_record(cls, record: Mapping[str, object]) -> Self:
        """Read what :meth:`record` returned, whatever else a manifest holds."""
        options = {
            name: record[name]
            for name in _OPTIONS
            if record[name] is not None or name not in _NOT_ASKED
        }
        if isinstance(options["protect"], list):
            options["protect"] = tuple(options["protect"])
        made = RuleOptions.model_validate({"tau": 1} | options, strict=True)
        found = {name: record[name] for name in cls.model_fields if name != "options"}
        return cls.model_validate({"options": made} | found)
