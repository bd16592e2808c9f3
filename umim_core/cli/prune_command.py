"""``umim prune``: drop the rules of a checkpoint that cost the most, until a token reduction."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from umim_core.cli import shared_options as shared
from umim_core.cli.console_output import JsonFlag, log_lines
from umim_core.cli.documented import AtLeast1, OfFile
from umim_core.errors import ArtifactError, ConfigError, CorpusError, require
from umim_core.text.reading import Reading

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

    from umim_core.model.umim import UMIM
    from umim_core.rules.damage_table import DamageTable
    from umim_core.text.sources import Source

_HELD_OUT: Final = 10  # one segment in so many
_NOTABLE: Final = 1.1  # times the token reduction of --decode-tr


def prune(
    checkpoint: str,
    files: list[str],
    target_tr: float | None = None,
    every_rule: Annotated[bool, typer.Option("--keep-all")] = False,
    out: Path | None = None,
    heldout: OfFile = None,
    damage: Path | None = None,
    limit: AtLeast1 = 200_000,
    keep_digits: bool = False,
    protect: list[str] | None = None,
    decode_max_damage: Annotated[float | None, typer.Option(min=0.0)] = None,
    decode_tr: float | None = None,
    *,
    read_as: Reading,
    device: str | None = None,
    as_json: JsonFlag = False,
) -> None:
    """Drop the rules whose merging costs most per saved token.

    One pass over the text measures every rule. The damage table that it writes serves further calls
    with other targets. The checkpoint carries the price of every rule that stays. Digits are
    protected besides --protect, unless --keep-digits lets them stay.

    Options:
        checkpoint: A name that umim path lists, a directory or a hub repository.
        files: Training text, as umim mine takes it.
        target_tr: Token reduction that the rules that stay must meet: 0.2.
        every_rule: Measure only: all rules stay and carry their prices.
        heldout: Text that the token reduction is measured on; by default the last tenth of what is
            read: files in their order, up to --limit.
        damage: Damage table of this checkpoint, from an earlier call: no new pass.
        limit: Tokens of the text to read; those behind are not.
        keep_digits: Let rules with digits stay.
        decode_max_damage: Let generated tokens merge by rules of at most this price alone, in nats
            per saved token; prompts merge by all that stay.
        decode_tr: The same by effect: the cheapest rules, and ties, that reach this reduction.
    """
    from umim_core.checkpoint.checkpoint_index import own_place
    from umim_core.rules.protect import protected_ids
    from umim_core.rules.pruning import cut_to_reduction, keep_all, prune_by_damage, rules_under
    from umim_core.text.sources import sources_of

    bound = decode_max_damage
    _check_goals(target_tr, decode_tr, bound, every_rule=every_rule)
    if every_rule:
        protecting = {"--keep-digits": keep_digits, "--protect": protect}
        shared.refuse_ignored(protecting, "choose rules, while --keep-all keeps every one")
    goal = "all" if target_tr is None else target_tr
    target = own_place("pruned", out, f"{Path(checkpoint).resolve().name}-{goal}")
    place = target.directory
    _check_place(place, damage)
    sources = sources_of([tuple(names) for names in (files, heldout) if names], read_as)
    table = None if damage is None else _named_table(damage)
    base = shared.base_of(checkpoint)
    patterns = (*(() if keep_digits else ("digits",)), *(protect or ()))
    protected_ids(base.tokenizer, patterns)  # a bad pattern is refused before minutes of work
    length = base.rules.segment_length or shared.SEGMENT_LENGTH
    length = min(length, base.positions or length)  # rules may be of longer segments
    rows, heldout_rows = _rows(base.tokenizer, length, sources, limit)
    from umim_core import UMIM
    from umim_core.backbone.devices import default_device
    from umim_core.evaluation.rule_damage import text_digest
    from umim_core.rules.matcher import Matcher
    from umim_core.text.token_ids import flat

    if table is not None:
        same = bool(heldout) or table.origin.text_digest == text_digest(list(rows))
        rule = "without --heldout, the damage table must be of the text that is not held out"
        other = f"one of {table.origin.tokens:,} tokens of other text"
        remedy = "Give --heldout, or the text and limit that were measured."
        require(same, ConfigError, rule, other, remedy)
    umim = UMIM.from_pretrained(
        checkpoint,
        device=default_device() if device is None else device,
        dtype="float32",
        budget=math.inf,
    )
    if table is None:
        table = _measured(umim, rows, place / "damage")
    else:
        _check_own(table, str(damage), umim)
    text = flat(list(heldout_rows))
    if target_tr is None:
        cut = keep_all(table, text)
    else:
        cut = prune_by_damage(table, text, target_tr, base.tokenizer, patterns)
    if decode_tr is not None:
        price = cut.rules.require_prices()
        bound = cut_to_reduction(cut.rules, price, text, decode_tr).dearest
    pruned = umim.checkpoint.with_contents(umim.checkpoint.module, cut.rules)
    pruned.decoding_under(bound).save(place / "checkpoint")  # no bound on other prices
    decoding = cut.rules if bound is None else rules_under(cut.rules, bound)
    saved = table.saved_tokens
    before, after_decoding = (by.token_reduction(*text) for by in (umim.matcher, Matcher(decoding)))
    # Prices are estimated nats per occurrence of a rule, over the tokens that one saves.
    found: dict[str, Any] = {
        "damage": str(damage or place / "damage"),
        "rules_before": len(table.rules),
        "rules": len(cut.rules),
        "rules_met": int((table.occurrences > 0).sum()),
        "measured_tokens": table.origin.tokens,
        "heldout_tokens": heldout_rows.size,
        "token_reduction_before": before,
        "token_reduction": cut.token_reduction,
        "max_damage": cut.dearest,
        "damage_dropped": float(table.kl[~cut.kept].sum() / table.kl.sum()),
        "savings_dropped": float(saved[~cut.kept].sum() / saved.sum()),
        "protect": cut.rules.options.protect,
        "decode_target": decode_tr,
        "decode_max_damage": bound,
        "decode_rules": len(decoding),
        "decode_token_reduction": after_decoding,
    }
    lines = _lines(found)
    if patterns and target_tr is not None:
        lines.append(f"no rule holds: {', '.join(cut.rules.options.protect)}")
    lines.append(f"damage table: {found['damage']}   (--damage: other targets without a new pass)")
    shared.emit_checkpoint(target, place / "checkpoint", found, lines, as_json)


def _lines(found: dict[str, Any]) -> list[str]:
    before, after = found["token_reduction_before"], found["token_reduction"]
    lines = [
        f"{found['rules_before']:,} rules, {found['rules_met']:,} of them met in "
        f"{found['measured_tokens']:,} tokens",
        f"{found['rules']:,} rules stay: token reduction {before:.2%} -> {after:.2%} on "
        f"{found['heldout_tokens']:,} held-out tokens",
        f"the dearest rule that stays costs an estimated {found['max_damage']:.3g} nats per "
        "occurrence, over the tokens that one saves",
    ]
    if found["rules"] < found["rules_before"]:
        lines.append(
            f"the others held {found['damage_dropped']:.1%} of the measured divergence and "
            f"{found['savings_dropped']:.1%} of the saved tokens"
        )
    bound, reduction = found["decode_max_damage"], found["decode_token_reduction"]
    if bound is not None:
        lines.append(
            f"generated tokens merge by {found['decode_rules']:,} rules of at most {bound} nats "
            f"per saved token: token reduction {reduction:.2%} of the held-out text"
        )
    target = found["decode_target"]
    if target is not None and reduction > _NOTABLE * target:
        lines.append(
            f"({target:.2%} were asked for: many rules have the price of the dearest one, as "
            "rules that were not met do, and a bound takes all of them)"
        )
    return lines


def _check_goals(
    target_tr: float | None, decode_tr: float | None, bound: float | None, *, every_rule: bool
) -> None:
    from umim_core.rules.pruning import check_target

    def check(ok: bool, rule: str, remedy: str) -> None:
        found = f"--target-tr {target_tr}, --decode-tr {decode_tr}, --decode-max-damage {bound}"
        require(ok, ConfigError, rule, found, remedy)

    rule = "pruning needs a target or --keep-all, and not both"
    remedy = "Give --target-tr 0.2, or --keep-all to measure the rules and drop none."
    check((target_tr is None) == every_rule, rule, remedy)
    rule = "the rules of decoding need one bound"
    remedy = "Leave one of them out."
    check(bound is None or decode_tr is None, rule, remedy)
    rule = "--decode-max-damage must be finite"
    remedy = "Leave it out to merge by all rules."
    check(bound is None or math.isfinite(bound), rule, remedy)
    for goal_tr in (target_tr, decode_tr):
        if goal_tr is not None:
            check_target(goal_tr)
    rule = "--decode-tr must not exceed --target-tr: generated tokens merge by rules that stay"
    fits = decode_tr is None or target_tr is None or decode_tr <= target_tr
    check(fits, rule, "Lower --decode-tr, or raise --target-tr.")


def _check_place(place: Path, damage: Path | None) -> None:
    """Refuse a folder that exists, but for one that a call left with its damage table alone."""
    from umim_core.store.publication import check_absent

    known = place / "damage"
    measured = place.is_dir() and [x for x in place.iterdir() if x.name[0] != "."] == [known]
    if measured:
        remedy = f"Add --damage {known}, or choose another --out."
        rule = "a damage table that is there must be named"
        named = damage is not None and damage.resolve() == known.resolve()
        require(named, ArtifactError, rule, str(known), remedy)
    check_absent(place / "checkpoint" if measured else place)


def _named_table(damage: Path) -> DamageTable:
    from umim_core.rules.damage_table import DamageTable

    inner = damage / "damage"
    remedy = f"Name {inner}." if inner.is_dir() else "Leave it out to measure one."
    written = (damage / "occurrences.npy").is_file()
    rule = "--damage must be a damage table, the folder 'damage' that umim prune wrote"
    require(written, ConfigError, rule, str(damage), remedy)
    return DamageTable.load(damage)


def _measured(umim: UMIM, rows: NDArray[np.int32], place: Path) -> DamageTable:
    """Measure the rules on segments [rows, length], and write their damage table."""
    from umim_core.evaluation.rule_damage import measure_damage
    from umim_core.progress import log_progress, logger
    from umim_core.store.locking import computing

    log_lines("umim.progress")
    see = log_progress("tokens measured")
    with computing():
        table = measure_damage(list(rows), umim.merged_model, progress=lambda n: see(n, rows.size))
    table.save(place)
    logger.info("damage table: %s", place)
    return table


def _check_own(table: DamageTable, directory: str, umim: UMIM) -> None:
    """Refuse a table of other rules, of another module or of another model."""
    origin = table.origin
    pairs = {
        "other rules": (table.rules.digest, umim.rules.digest),
        "another module": (origin.module_digest, umim.module.digest()),
        "other unit positions": (origin.unit_positions, umim.merged_model.unit_positions),
        "another backbone": (origin.backbone_fingerprint, umim.backbone.fingerprint),
    }
    odd = [part for part, (measured, ours) in pairs.items() if measured != ours]
    rule = f"{directory} must be the damage table of this checkpoint"
    remedy = "Leave --damage out to measure it."
    require(not odd, ConfigError, rule, f"one of {', '.join(odd)}", remedy)


def _rows(
    tokenizer: PreTrainedTokenizerBase, length: int, sources: list[Source], limit: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return segments of so many tokens to measure on, and held-out ones [rows, length]."""
    from umim_core.text.token_ids import segment_rows
    from umim_core.text.tokens import check_known, first_ids

    read = [first_ids(source, tokenizer, limit) for source in sources]
    for ids in read:
        check_known(ids, tokenizer)
    whole = [len(ids) // length for ids in read]
    rule = f"pruning needs a segment of {length} tokens to measure on and one held out"
    found = [len(ids) for ids in read]
    remedy = "Give more text or a higher --limit."
    require(min(whole) > 0 and sum(whole) > 1, CorpusError, rule, f"{found} tokens", remedy)
    parts = [segment_rows(ids, length) for ids in read]
    if len(parts) == 1:
        last = max(1, len(parts[0]) // _HELD_OUT)
        parts = [parts[0][:-last], parts[0][-last:]]
    return parts[0], parts[1]
