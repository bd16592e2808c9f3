"""``umim rules``: inspect a rule set."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from umim_core.checkpoint.checkpoint_files import named_config, named_place
from umim_core.cli import shared_options as shared
from umim_core.cli.console_output import JsonFlag, emit
from umim_core.cli.documented import OfFile
from umim_core.embedded.assets import embedded_names
from umim_core.errors import ArtifactError, BackboneError, CheckpointError, ConfigError
from umim_core.text.reading import Reading

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from umim_core.rules.ruleset import RuleSet
    from umim_core.text.sources import Source


_TOP: Final = 20  # most frequent spans that are shown


def rules(
    directory: Annotated[str, typer.Argument(metavar="DIR")],
    heldout: OfFile = None,
    tokenizer: str | None = None,
    scan: bool = False,
    *,
    read_as: Reading,
    as_json: JsonFlag = False,
) -> None:
    """Show what a rule set holds and how far it shortens held-out text.

    Options:
        directory: Rule directory, checkpoint or embedded name.
        heldout: Held-out text or .npy ids; may be repeated.
        tokenizer: Embedded name, directory or hub id; known for a checkpoint.
        scan: Look for addresses, keys, numbers; status 1 if any.
    """
    from umim_core.rules.inspection import top_rules, visible
    from umim_core.rules.leaks import scan_rules
    from umim_core.rules.ruleset import RuleSet
    from umim_core.text.sources import TokenIds, sources_of
    from umim_core.text.token_ids import decode

    of_checkpoint, revision = tokenizer is None, None
    if tokenizer is None:
        with suppress(ArtifactError, CheckpointError):  # a rule directory, say
            config = named_config(directory)
            tokenizer, revision = config.backbone, config.backbone_revision
    if scan and tokenizer is None:
        raise ConfigError("a scan needs a tokenizer to read the rules", "none", "Add --tokenizer.")
    sources = sources_of([tuple(heldout)] if heldout else [], read_as)
    ruleset = RuleSet.load(_rule_directory(directory))
    known, why = None, "no --tokenizer was given to decode them"
    if tokenizer is not None:
        from umim_core.backbone.tokenizer_files import (
            load_tokenizer,
            special_ids,
            tokenizer_fingerprint,
        )

        try:
            known = load_tokenizer(tokenizer, revision=revision)
        except BackboneError as error:  # of a model that is fetched by hand, say
            texts = not all(isinstance(source, TokenIds) for source in sources)
            if not of_checkpoint or scan or texts:
                raise
            why = f"their tokenizer is not here: {error.value}. {error.remedy}"
    if known is not None:
        ruleset.check_tokenizer(tokenizer_fingerprint(known))
        ruleset.check_vocabulary(len(known), special_ids(known))
    measured = _measure(ruleset, sources[0], known) if sources else None
    leaks = scan_rules(ruleset, known) if scan and known is not None else None

    most: list[dict[str, Any]] = [
        {
            "ids": list(ids),
            "count": count,
            "text": None if known is None else decode(known, ids, special=True),
        }
        for ids, count in top_rules(ruleset, _TOP)
    ]
    document: dict[str, object] = {
        "directory": directory,
        "rules": len(ruleset),
        "orders": {str(n): count for n, count in ruleset.counts_by_order.items()},
        **ruleset.origin.record(),
        "digest": ruleset.digest,
        "infix_free": ruleset.infix_free,
        "top": most,
        "heldout": measured,
        "leaks": None if leaks is None else [asdict(leak) for leak in leaks],
    }
    lines = [*_head(ruleset), "", *_orders(ruleset)]
    if most:
        lines += ["", "Most frequent", f"{'count':>12}{'n':>4}   span"]
        for rule in most:
            text = " ".join(map(str, rule["ids"])) if known is None else visible(rule["text"])
            lines.append(f"{rule['count']:>12,}{len(rule['ids']):>4}   {text}")
    if known is None:
        lines += ["", f"Rules are shown as token ids: {why.rstrip('.')}."]
    if measured is not None:
        lines += ["", *_heldout(measured)]
    if leaks is not None:
        lines += ["", f"Scan: {len(leaks):,} rules spell out an address, a key or private numbers"]
        lines += [f"{leak.count:>12,}   {leak.kind:<18} {visible(leak.text)}" for leak in leaks]
    emit(document, lines, as_json)
    if leaks:
        raise typer.Exit(1)


def _rule_directory(name: str) -> Path:
    """Return the rule directory itself, or the one inside a checkpoint."""
    path = named_place(name)
    for directory in (path / "rules", path / "checkpoint" / "rules", path):
        if (directory / "manifest.json").is_file():
            return directory
    state = ", a file" if path.is_file() else "" if path.exists() else ", which does not exist"
    known = ", ".join(embedded_names("checkpoint"))
    raise ArtifactError(
        f"rules must be a rule directory, a checkpoint or one of {known}",
        f"{name}{state}",
        "Check the name, or make rules of texts: umim mine TEXTS --tokenizer MODEL --out DIR.",
    )


def _measure(
    rules: RuleSet, source: Source, tokenizer: PreTrainedTokenizerBase | None
) -> dict[str, Any]:
    """Match the rules on held-out text, cut as the corpus was."""
    import numpy as np

    from umim_core.rules.inspection import coverage
    from umim_core.rules.matcher import Matcher
    from umim_core.text.sources import TokenIds
    from umim_core.text.token_ids import segment_borders
    from umim_core.text.tokens import iter_token_pieces

    length = rules.options.segment_length or shared.SEGMENT_LENGTH
    pieces = list(iter_token_pieces(source, tokenizer))
    tokens = np.concatenate([ids for ids, _ in pieces])
    offsets = np.array(segment_borders(len(tokens), length))
    ids = tokens[: offsets[-1]]
    return {
        "coverage": coverage(ids, offsets, Matcher(rules)),
        "segment_length": length,
        "documents": None if isinstance(source, TokenIds) else sum(last for _, last in pieces),
    }


def _head(rules: RuleSet) -> list[str]:
    origin, made, damage = rules.origin, rules.options, rules.origin.max_damage
    price = "estimated nats per occurrence, over the tokens that one saves"
    facts = {
        "source": made.source,
        "tau": "none" if made.source == "explicit" else f"{made.tau:,}",
        "documents": f"at least {made.min_documents:,} per rule",
        "filters": f"overlap {made.overlap}, containment {made.containment}",
        "segments": f"{made.segment_length:,} tokens" if made.segment_length else "ragged",
        "infix-free": "yes, no rule lies inside another" if rules.infix_free else "no",
        "tokenizer": (origin.tokenizer_fingerprint or "unknown")[:12],
        "corpus": (origin.corpus_digest or "unknown")[:12],
        "protected": ", ".join(made.protect),
        "probability": f"over {made.min_probability:g} for every token of a span"
        if made.source == "confidence"
        else "",
        "damage": "" if damage is None else f"at most {damage:.3g} {price}",
    }
    return [f"{name:<12}{value}" for name, value in facts.items() if value]


def _orders(rules: RuleSet) -> list[str]:
    import numpy as np

    lines = [f"{'':<10}{'rules':>12}{'share':>9}{'least':>12}{'median':>12}{'most':>14}"]
    for n, support in rules.support_by_order.items():
        line = f"{f'{n}-grams':<10}{len(support):>12,}{len(support) / max(1, len(rules)):>9.1%}"
        if len(support):
            line += f"{support.min():>12,}{int(np.median(support)):>12,}{support.max():>14,}"
        lines.append(line)
    return [*lines, f"{'all':<10}{len(rules):>12,}"]


def _heldout(measured: dict[str, Any]) -> list[str]:
    from umim_core.progress import numbered

    coverage = measured["coverage"]
    count, segments = measured["documents"], numbered(coverage["segments"], "segment")
    documents = "" if count is None else f", {numbered(count, 'document')}"
    spans = coverage["spans"]
    total = sum(spans.values())
    shares = ", ".join(f"{n}-grams {count / max(1, total):.1%}" for n, count in spans.items())
    return [
        f"Held-out text: {coverage['tokens']:,} tokens in {segments} of "
        f"{measured['segment_length']:,}{documents}",
        f"Token reduction {coverage['token_reduction']:.2%} by {total:,} merged spans: {shares}",
    ]
