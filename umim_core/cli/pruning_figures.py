"""Figures of a pruning, as ``umim prune`` prints them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_NOTABLE: Final = 1.1  # times the token reduction that was asked for


@dataclass(frozen=True)
class Pruning:
    """Figures of a pruning.

    Attributes:
        checkpoint: Directory of the pruned checkpoint.
        damage: Directory of the damage table.
        name: Of the checkpoint, as umim path lists it.
        rules_before: Rules that were measured.
        rules: Rules that stay.
        rules_met: Rules that occur in the text.
        measured_tokens: Tokens of the text.
        heldout_tokens: Tokens that the token reduction is measured on.
        token_reduction_before: With all rules.
        token_reduction: With those that stay.
        max_damage: Price of the dearest rule that stays: estimated nats per occurrence, over the
            tokens that one saves.
        damage_dropped: Share of the measured divergence that the other rules held.
        savings_dropped: Share of the saved tokens that they held.
        protect: Patterns of tokens that no rule holds.
        decode_target: Token reduction that was asked of the rules that generated tokens merge by;
            None where none was.
        decode_max_damage: Most price of the rules that generated tokens merge by; None for all.
        decode_rules: How many these are.
        decode_token_reduction: With these alone.
    """

    checkpoint: str
    damage: str
    name: str
    rules_before: int
    rules: int
    rules_met: int
    measured_tokens: int
    heldout_tokens: int
    token_reduction_before: float
    token_reduction: float
    max_damage: float
    damage_dropped: float
    savings_dropped: float
    protect: tuple[str, ...]
    decode_target: float | None
    decode_max_damage: float | None
    decode_rules: int
    decode_token_reduction: float

    def lines(self) -> list[str]:
        """Return them for people."""
        dropped = (
            f"the others held {self.damage_dropped:.1%} of the measured divergence and "
            f"{self.savings_dropped:.1%} of the saved tokens"
        )
        decoding = (
            f"generated tokens merge by {self.decode_rules:,} rules of at most "
            f"{self.decode_max_damage} nats per saved token: token reduction "
            f"{self.decode_token_reduction:.2%} of the held-out text"
        )
        wanted = self.decode_target
        if wanted is not None and self.decode_token_reduction > _NOTABLE * wanted:
            decoding += (
                f", more than the {wanted:.2%} asked for: many rules have the price of the dearest "
                "one, as rules that were not met do, and a bound takes all of them"
            )
        return [
            f"{self.rules_before:,} rules, {self.rules_met:,} of them met in "
            f"{self.measured_tokens:,} tokens",
            f"{self.rules:,} rules stay: token reduction {self.token_reduction_before:.2%} -> "
            f"{self.token_reduction:.2%} on {self.heldout_tokens:,} held-out tokens",
            *([dropped] if self.rules < self.rules_before else []),
            f"the dearest rule that stays costs an estimated {self.max_damage:.3g} nats per "
            "occurrence, over the tokens that one saves",
            *([f"no rule holds: {', '.join(self.protect)}"] if self.protect else []),
            *([decoding] if self.decode_max_damage is not None else []),
            f"checkpoint:   {self.checkpoint}",
            f"damage table: {self.damage}   (--damage: other targets without a new pass)",
            f"name:         {self.name}   (umim path lists all)",
        ]
