"""Policies that choose rules until a token reduction is met: by damage, by count, by savings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from umim_core import UMIM
from umim_core.errors import ConfigError, did_you_mean
from umim_core.evaluation.rule_damage import WINDOW, measure_damage, text_digest
from umim_core.rules.damage_table import DamageTable
from umim_core.rules.grams import ORDERS
from umim_core.rules.inspection import token_reduction
from umim_core.rules.matcher import Matcher
from umim_core.rules.protect import protected_ids
from umim_core.rules.pruning import Cut, Text, cut_to_budget, free_of, prices
from umim_core.rules.ruleset import RuleSet
from umim_core.store.artifacts import canonical_json, sha256_bytes

DAMAGE: Final = "damage"
ALL: Final = "all"  # no choice: every rule
EVICTION: Final = "eviction"  # every rule, spans evicted from the KV cache and not merged
Floats = NDArray[np.float64]


def _support(rules: RuleSet) -> Floats:
    return np.concatenate([rules.support_by_order[n] for n in ORDERS]).astype(np.float64)


def _sizes(rules: RuleSet) -> NDArray[np.int64]:
    return np.repeat(np.array(ORDERS), list(rules.counts_by_order.values()))


# Policies that need no measurement: the price of each rule [R], the least is kept first.
BY_COUNTS: Final[dict[str, Callable[[RuleSet], Floats]]] = {
    "count": lambda rules: -_support(rules),
    "saved": lambda rules: -_support(rules) * (_sizes(rules) - 1),
}
POLICIES: Final = (DAMAGE, *BY_COUNTS, ALL)


def choose_rules(
    policy: str,
    target: float | None,
    umim: UMIM,
    text: Text,
    protect: Sequence[str],
    table: DamageTable | None,
) -> Cut:
    """Return the rules of a policy that meet a token reduction.

    Args:
        policy: One of ``POLICIES``, or ``EVICTION``.
        target: The token reduction; None keeps every rule.
        umim: Whose rules they are.
        text: Ids and borders of the text that the reduction is met on.
        protect: Patterns of tokens that no rule may hold.
        table: Damage of the rules; needed by the policy of that name.

    Raises:
        RuleSetError: If all rules together do not reach the target.
    """
    rules = umim.rules
    free = free_of(rules, protected_ids(umim.backbone.require_tokenizer(), tuple(protect)))
    if target is None:
        kept = rules.take(free)
        return Cut(kept, free, token_reduction(*text, Matcher(kept)), np.inf)
    if policy != DAMAGE:
        return cut_to_budget(rules, BY_COUNTS[policy](rules), text, target, free)
    assert table is not None
    return cut_to_budget(rules, prices(table), text, target, free)


def check_tables(tables: Iterable[str], checkpoints: Iterable[str]) -> None:
    """Refuse a damage table of no checkpoint: it would not be used.

    Raises:
        SystemExit: If a name is none of the checkpoints'.
    """
    known = list(checkpoints)
    for name in tables:
        if name not in known:
            raise SystemExit(
                f"--damage-table must name a checkpoint ({', '.join(known)}), got {name}. "
                + (did_you_mean(name, known) or "Leave it out.")
            )


def check_held_out(name: str, table: DamageTable, test: Sequence[NDArray[np.int32]]) -> None:
    """Refuse a damage table that was measured on the rows that quality is measured on.

    Raises:
        SystemExit: If it was.
    """
    if table.origin.text_digest == text_digest(test):
        raise SystemExit(f"the damage table of {name} was measured on the rows of --test")


def damage_table(
    umim: UMIM,
    rows: Sequence[NDArray[np.int32]],
    given: Path | None,
    folder: Path,
    batch_size: int,
    progress: Callable[[int], object],
) -> DamageTable:
    """Return the damage of a checkpoint's rules: given, kept from an earlier call, or measured.

    Args:
        umim: The model.
        rows: Text to measure on.
        given: Directory of a table; its module may be another one, its rules not.
        folder: Where measured tables are kept, by all that decides them.
        batch_size: Rows per forward.
        progress: Called with the number of tokens done so far.

    Raises:
        ConfigError: If a given table is of other rules.
        ArtifactError: If a table was altered.
    """
    if given is not None:
        table = DamageTable.load(given)
        if table.rules.digest != umim.rules.digest:
            raise ConfigError(
                f"{given} must be a damage table of the checkpoint's rules",
                f"one of {len(table.rules):,} other rules",
                "Leave --damage-table out to measure one.",
            )
        return table
    key = {
        "rules": umim.rules.digest,
        "module": umim.module.digest(),
        "backbone": umim.backbone.fingerprint,
        "unit_positions": umim.compressed.unit_positions,
        "text": text_digest(rows),
        "row_lengths": sorted({len(row) for row in rows}),
        "window": WINDOW,
    }
    place = folder / f"damage-{sha256_bytes(canonical_json(key).encode())[:16]}"
    if place.is_dir():
        return DamageTable.load(place)
    folder.mkdir(parents=True, exist_ok=True)
    table = measure_damage(rows, umim.compressed, batch_size=batch_size, progress=progress)
    table.save(place)
    return table


def table_digest(table: DamageTable) -> str:
    """Return what identifies a table: its rules, its model and its text."""
    record = {"rules": table.rules.digest, **table.origin.model_dump()}
    return sha256_bytes(canonical_json(record).encode())
