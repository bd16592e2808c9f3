"""Pruning: the rules of the least price, until a token reduction is met within one rule.

The price of a rule is the divergence of one occurrence, estimated (``DamageTable.mean_kl``), over
the tokens that one saves. Removing a rule frees its tokens for others, so neither its savings nor
the reduction of what stays follow from counts: the rules inside it take its place (``prices``), and
the reduction is that of the matcher with the rules that stay (``cut_to_reduction``).

Example: (a, b, c) costs 1.4 nats, 0.7 per saved token; (a, b) inside it costs 0.2. Without
(a, b, c) its text becomes (a, b) c, so (a, b, c) saves one token more and costs 1.2 more: its price
is 1.2, and it goes before a pair of price 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from umim_core.errors import ConfigError, RuleSetError, require
from umim_core.rules.damage_table import DamageTable, Floats
from umim_core.rules.grams import MAX_LONGEST
from umim_core.rules.matcher import Matcher
from umim_core.rules.protect import protected_ids
from umim_core.rules.ruleset import RuleOrigin, RuleSet
from umim_core.text.token_ids import Ints

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Text = tuple[NDArray[np.integer], Ints]  # ids of all segments, flat, and segment borders
_STEPS: Final = 32  # recorded prices
_MOST_REDUCTION: Final = (MAX_LONGEST - 1) / MAX_LONGEST


@dataclass(frozen=True)
class Cut:
    """Rules that reach a token reduction.

    Attributes:
        rules: Those that stay; ``kept`` says it of each rule of the set [R] (bool).
        token_reduction: (raw tokens - units) / raw tokens with these rules alone.
        dearest: Price of the dearest rule that stays.
    """

    rules: RuleSet
    kept: NDArray[np.bool_]
    token_reduction: float
    dearest: float


def prices(table: DamageTable) -> Floats:
    """Return the price of each rule [R]: estimated nats per occurrence, over the tokens it saves.

    With d the mean divergence of one occurrence (``DamageTable.mean_kl``) and s = n - 1 the tokens
    that it saves, D and S the same of the units that shorter rules make of its span::

        price = max(d / s, (d - D) / (s - S))        d / s where no shorter rule matches

    The second part is what the rule adds to those inside it. The first is the larger one where they
    are dearer than it is: then they go before it. Where no rule lies inside another, it is d / s.
    """
    rules, sizes, means = table.rules, table.rules.sizes, table.mean_kl()
    within, within_saved = np.zeros(len(means)), np.zeros(len(means), dtype=np.int64)
    for n in rules.orders[1:]:
        shorter, spans = rules.take(sizes < n), np.flatnonzero(sizes == n)
        if not len(shorter) or not len(spans):
            continue
        ids = rules.ids_by_order[n].ravel()
        borders = np.arange(len(spans) + 1, dtype=np.int64) * n
        starts, lengths, _ = Matcher(shorter).segment_many(ids, borders)
        for size in range(2, n):
            at = starts[lengths == size]
            inner = rules.places(ids[at[:, None] + np.arange(size)])
            np.add.at(within, spans[at // n], means[inner])
            np.add.at(within_saved, spans[at // n], size - 1)
    saved = sizes - 1
    return np.maximum(means / saved, (means - within) / (saved - within_saved))


def priced(table: DamageTable) -> RuleSet:
    return table.rules.with_prices(prices(table).astype(np.float32))


def cut_to_reduction(
    rules: RuleSet,
    price: NDArray[np.floating],
    text: Text,
    target: float,
    free: NDArray[np.bool_] | None = None,
) -> Cut:
    """Keep the rules of the least price [R] until they reach a token reduction on a text.

    Rules are taken by rising price, of equal ones the most frequent first. Were the last one that
    is taken left out, the reduction would be below the target: it is met within one rule.
    Each trial matches the text anew with the rules of the trial; bisection finds their number. The
    text is flat ids [T] and segment borders [num_segments + 1]; only ``free`` rules [R] (bool) may
    stay, None for all.
    """
    order = _by_price(rules, price)
    if free is not None:
        order = order[free[order]]

    def reduction(taken: int) -> float:
        return Matcher(rules.take(_first(order, taken, len(price)))).token_reduction(*text)

    taken, reached = len(order), reduction(len(order))
    rule = f"the rules must reach a token reduction of {target:.4g} on the held-out text"
    found = f"{reached:.4g} with all {taken:,} that may stay"
    remedy = "Lower the target, protect fewer tokens, or mine more rules."
    require(reached >= target, RuleSetError, rule, found, remedy)
    below = 0  # so many are too few
    while taken - below > 1:
        middle = (below + taken) // 2
        reached_here = reduction(middle)
        if reached_here < target:
            below = middle
        else:
            taken, reached = middle, reached_here
    stays = _first(order, taken, len(price))
    return Cut(rules.take(stays), stays, reached, float(price[order[taken - 1]]))


def recording_reductions(rules: RuleSet, text: Text) -> RuleSet:
    """Return priced rules whose origin records what the cheapest of them save of a text.

    Prices at even steps through the rules are recorded, each with the token reduction of all rules
    of at most this price. ``at_reduction`` reads them.
    """
    shares = np.arange(1, _STEPS + 1) / _STEPS
    steps = np.unique(np.quantile(rules.require_prices(), shares, method="higher"))
    reductions = [Matcher(rules_under(rules, step)).token_reduction(*text) for step in steps]
    record = {"price_steps": tuple(map(float, steps)), "price_reductions": tuple(reductions)}
    return rules.with_origin(rules.origin.model_copy(update=record))


def at_reduction(rules: RuleSet, target: float | None) -> RuleSet:
    """Return the cheapest rules that save a share of the text that prices were measured with.

    The number of rules between two recorded steps follows from a straight line; of equal prices the
    most frequent rules come first. All rules without a target.
    """
    if target is None:
        return rules
    price, steps = rules.require_prices(), np.array(rules.origin.price_steps, dtype=np.float32)
    rule = "target_tr needs the token reduction of the cheapest rules, recorded with their prices"
    remedy = "Measure them again: umim prune CHECKPOINT TEXTS --keep-all; or give budget."
    require(len(steps) > 0, RuleSetError, rule, f"{len(rules):,} rules without it", remedy)
    reductions = np.maximum.accumulate(rules.origin.price_reductions)
    rule = f"the rules must reach a token reduction of {target:.4g}"
    found = f"{reductions[-1]:.4g} with all {len(rules):,}, on the text of the measurement"
    remedy = "Lower target_tr, or give budget=inf for all rules."
    require(bool(target <= reductions[-1]), RuleSetError, rule, found, remedy)
    reductions, at = np.unique(reductions, return_index=True)  # a step that saves no more goes
    counts = np.searchsorted(np.sort(price), steps[at], side="right")
    taken = int(np.ceil(np.interp(target, [0.0, *reductions], [0, *counts])))
    return rules.take(_first(_by_price(rules, price), max(1, taken), len(price)))


def _by_price(rules: RuleSet, price: NDArray[np.floating]) -> Ints:
    return np.lexsort((-rules.support, price))


def prune_by_damage(
    table: DamageTable,
    text: Text,
    target: float,
    tokenizer: PreTrainedTokenizerBase,
    protect: Sequence[str] = (),
) -> Cut:
    """Keep the rules of the least damage per saved token until they reach a token reduction.

    Returns:
        The rules with their prices; their origin records the price of the dearest, the protected
        patterns and what ``at_reduction`` reads.
    """
    free = _free(table.rules, tokenizer, protect) if protect else None
    rules = priced(table)
    cut = cut_to_reduction(rules, rules.require_prices(), text, target, free)
    origin = _protecting(cut.rules, protect).model_copy(update={"max_damage": cut.dearest})
    return replace(cut, rules=recording_reductions(cut.rules.with_origin(origin), text))


def keep_all(table: DamageTable, text: Text) -> Cut:
    """Keep every rule of a damage table, with its price and the record of ``at_reduction``."""
    rules = priced(table)
    stays = np.ones(len(rules), dtype=np.bool_)
    dearest = float(rules.require_prices().max())
    reduction = Matcher(rules).token_reduction(*text)
    return Cut(recording_reductions(rules, text), stays, reduction, dearest)


def rules_under(rules: RuleSet, bound: float) -> RuleSet:
    return rules.take(rules.require_prices() <= bound)


def check_rule_choice(budget: object, target: float | None) -> None:
    """Refuse a budget that is no number of nats per saved token, or a target beside it."""
    rule = "rules are chosen by a budget or by target_tr"
    found = f"budget {budget} and target_tr {target}"
    require(budget is None or target is None, ConfigError, rule, found, "Leave one of them out.")
    if target is not None:
        check_target(target)
    number = budget if isinstance(budget, int | float) and not isinstance(budget, bool) else -1.0
    rule = "a budget must be a number of nats per saved token, at least 0"
    remedy = "Give 0.1 for example, or inf for all rules."
    require(budget is None or number >= 0, ConfigError, rule, budget, remedy)


def within_budget(rules: RuleSet, budget: float | None) -> RuleSet:
    """Return the rules whose measured price is at most a budget; all without one or for inf."""
    if budget in (None, math.inf):
        return rules
    affordable = rules_under(rules, budget)
    if not len(affordable):
        raise RuleSetError(
            "a budget must leave at least one rule",
            f"{budget} nats per saved token; the cheapest of {len(rules):,} rules costs "
            f"{float(rules.require_prices().min()):.3g}",
            "Raise it, or merge none.",
        )
    return affordable


def without_tokens(
    rules: RuleSet, tokenizer: PreTrainedTokenizerBase, protect: Sequence[str]
) -> RuleSet:
    """Return the rules that hold no protected token; their origin records the patterns."""
    remaining = rules.take(_free(rules, tokenizer, protect))
    rule = "rules must be left when those with protected tokens go"
    found = f"none of {len(rules):,} without {list(protect)}"
    require(len(remaining) > 0, RuleSetError, rule, found, "Protect fewer tokens.")
    return remaining.with_origin(_protecting(remaining, protect))


def _protecting(rules: RuleSet, protect: Sequence[str]) -> RuleOrigin:
    known = rules.origin
    patterns = tuple(dict.fromkeys((*known.options.protect, *protect)))
    return known.with_options({"protect": patterns})


def _free(
    rules: RuleSet, tokenizer: PreTrainedTokenizerBase, protect: Sequence[str]
) -> NDArray[np.bool_]:
    """Return which rules hold no protected token [R]."""
    tokens = protected_ids(tokenizer, protect)
    protected = [np.isin(ids, tokens).any(axis=1) for ids in rules.ids_by_order.values()]
    return ~np.concatenate(protected)


def check_target(target: object) -> None:
    share = target if isinstance(target, int | float) else 0.0
    rule = f"a target token reduction must lie above 0 and below {_MOST_REDUCTION}"
    remedy = "Give a share of the tokens, such as 0.2."
    require(0.0 < share < _MOST_REDUCTION, ConfigError, rule, target, remedy)


def _first(order: Ints, taken: int, size: int) -> NDArray[np.bool_]:
    stays = np.zeros(size, dtype=np.bool_)
    stays[order[:taken]] = True
    return stays
