"""Model cards of the shipped merge checkpoints, from a committed result file."""

from __future__ import annotations

import json
from functools import partial
from typing import Any, Final

import numpy as np

from docs.make.document import RESULTS, ROOT, Document
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.checkpoint.checkpoint_files import CheckpointConfig
from umim_core.config.recipe import Recipe
from umim_core.config.recipe_files import read_recipe_file, validated
from umim_core.rules.ruleset import RuleSet

_ASSETS: Final = ROOT / "umim_core" / "embedded" / "assets"
_CARD: Final = """\
---
license: apache-2.0
library_name: umim
---
# {name}

A UMIM merge checkpoint (`checkpoint/`: merge module and rules) for the frozen backbone `{name}` (`backbone/`, with a card of its own).

- **Rules**: {count:,} spans ({orders}), {origin}, overlap `{rules.origin.overlap}`, containment `{rules.origin.containment}`, segments
  of {rules.origin.segment_length} tokens.
- **Module**: {form}, {parameters:,} parameters ({formula}).
- **Training**: predictive distillation, {config.training[steps]} steps of {budget}; selected by
  validation cross-entropy (step {config.training[best_step]}). `python -m flows run {recipe.name}` trains it again.

Measured on the held-out test split of the same corpus (alignment on {results[alignment_rows]} segments of {recipe.segment_length}, {metrics[aligned_rows]:,.0f} aligned rows; perplexity on
{results[perplexity_rows]} segments, one forward, all raw tokens counted):

| token reduction | Top-1 | Top-3 | Top-10 | Top-p | MRR | KL (nats) | PPL base | PPL UMIM |
|---|---|---|---|---|---|---|---|---|
| {metrics[token_reduction]:.1%} | {metrics[top1]:.3f} | {metrics[top3]:.3f} | {metrics[top10]:.3f} | {metrics[topp]:.3f} | {metrics[mrr]:.3f} | {metrics[kl]:.3f} | {metrics[ppl_base]:.2f} | {metrics[ppl_umim]:.2f} |

Out of domain, {results[perplexity_rows]} segments each:

| corpus | token reduction | PPL base | PPL UMIM |
|---|---|---|---|
| networkx + sympy docstrings | {metrics[ppl_token_reduction_ood_math]:.1%} | {metrics[ppl_base_ood_math]:.2f} | {metrics[ppl_umim_ood_math]:.2f} |
| standard library docstrings | {metrics[ppl_token_reduction_ood_stdlib]:.1%} | {metrics[ppl_base_ood_stdlib]:.2f} | {metrics[ppl_umim_ood_stdlib]:.2f} |

Source: docs/results/shipped.json (`{results[command]}`, {results[machine]}).
"""

# Parameters by (kind, depth, positions), of a module of size d.
_FORMULAS: Final = {
    ("attention", 1, "none"): "2d² + 7d",
    ("attention", 1, "learned"): "2d² + 11d",
    ("attention", 3, "none"): "10d² + 19d",
    ("attention", 3, "learned"): "10d² + 23d",
    ("linear", 1, "none"): "4d² + 3d",
}


def _form(config: CheckpointConfig) -> str:
    """Return the form of a module in words."""
    placed = "" if config.unit_positions == "compact" else ", preserved unit positions"
    placed += "" if config.residual == "none" else f", {config.residual} residual"
    placed += f", {config.rule_rows:,} rule rows" if config.rule_rows else ""
    size = f"d {config.hidden_size}"
    if config.kind == "linear":
        return f"one linear layer over the span's embeddings side by side, {size}{placed}"
    layers = "attention pooling"
    if config.depth > 1:
        layers = f"{config.depth - 1} layers of self-attention over the span, then {layers}"
    heads = f"{size}, {config.num_heads} heads"
    return f"{layers}, {heads}, positions `{config.module_positions}`{placed}"


def _origin(rules: RuleSet) -> str:
    """Return in words what made the rules."""
    if rules.origin.source == "explicit":
        return "given as a list"
    spans = {
        "frequency": "mined on the docstring corpus at",
        "confidence": "spans of the docstring corpus that the backbone is confident about,",
    }
    dearest = rules.origin.max_damage
    kept = "" if dearest is None else f", of at most {dearest:.2f} nats of damage per saved token"
    return f"{spans[rules.origin.source]} tau {rules.origin.tau}{kept}"


def _budget(recipe: Recipe) -> str:
    """Return in words what a step of a recipe's distillation is, and where it runs."""
    distill, cluster = recipe.distill, recipe.cluster
    rate = np.format_float_scientific(distill.learning_rate, trim="-", exp_digits=1)
    workers = max(1, cluster.workers)  # none: in the process itself
    place = "GPU" if cluster.use_gpu else "CPU core"
    return (
        f"{distill.batch_size} segments of {recipe.segment_length} tokens, AdamW {rate}, "
        f"{'bfloat16' if distill.bf16 else 'float32'} products, "
        f"{'one' if workers == 1 else workers} {place}{'' if workers == 1 else 's'}"
    )


def documents() -> list[Document]:
    """Return the card of every shipped checkpoint."""
    results = json.loads((RESULTS / "shipped.json").read_text(encoding="utf-8"))
    file = ROOT / "infra" / "recipes" / "shipped.yaml"
    recipe = validated(Recipe, read_recipe_file(file), file.name)
    return [
        Document(
            _ASSETS / name / "README.md",
            partial(card, name, Checkpoint.load(name), recipe, results, metrics),
        )
        for name, metrics in results["checkpoints"].items()
    ]


def card(
    name: str,
    checkpoint: Checkpoint,
    recipe: Recipe,
    results: dict[str, Any],
    metrics: dict[str, float],
) -> str:
    """Return the card of a checkpoint of any form.

    Args:
        name: Of the checkpoint.
        checkpoint: Module and rules.
        recipe: What trained it.
        results: What was measured, and with what.
        metrics: The checkpoint's own part of the results.
    """
    rules, config = checkpoint.rules, checkpoint.config
    return _CARD.format(
        name=name,
        rules=rules,
        count=len(rules),
        orders=", ".join(f"{count:,} of {n}" for n, count in rules.counts_by_order.items()),
        origin=_origin(rules),
        config=config,
        form=_form(config),
        formula=_FORMULAS[config.kind, config.depth, config.module_positions]
        + (f" + {config.rule_rows}d" if config.rule_rows else ""),
        parameters=sum(p.numel() for p in checkpoint.module.parameters()),
        recipe=recipe,
        budget=_budget(recipe),
        results=results,
        metrics=metrics,
    )
