"""Write the model cards of the shipped merge checkpoints from a committed result file.

python infra/scripts/checkpoint_cards.py            rewrite the cards
python infra/scripts/checkpoint_cards.py --check    exit 1 if one is out of date
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from umim_core.checkpoint.checkpoint import Checkpoint, CheckpointConfig  # noqa: E402  (not installed)
from umim_core.config.recipe import Recipe  # noqa: E402
from umim_core.config.recipe_files import read_recipe_file, validated  # noqa: E402
from umim_core.rules.ruleset import RuleSet  # noqa: E402

RESULTS = ROOT / "docs" / "results" / "shipped.json"
RECIPE = ROOT / "infra" / "recipes" / "shipped.yaml"
ASSETS = ROOT / "umim_core" / "embedded" / "assets"
CARD = """\
---
license: apache-2.0
library_name: umim
---
# {name}

A UMIM merge checkpoint (`checkpoint/`: merge module and rules) for the frozen backbone `{name}` (`backbone/`, with a card of its own).

- **Rules**: {rules:,} spans ({orders}), {origin}, overlap `{overlap}`, containment `{containment}`, segments
  of {length} tokens.
- **Module**: {form}, {parameters:,} parameters ({formula}).
- **Training**: predictive distillation, {steps} steps of {budget}; selected by
  validation cross-entropy (step {best}). `python -m flows run {recipe}` makes it again.

Measured on the held-out test split of the same corpus (alignment on {alignment_rows} segments of {segment}, {aligned:,} aligned rows; perplexity on
{perplexity_rows} segments, one forward, all raw tokens counted):

| token reduction | Top-1 | Top-3 | Top-10 | Top-p | MRR | KL (nats) | PPL base | PPL UMIM |
|---|---|---|---|---|---|---|---|---|
| {token_reduction:.1%} | {top1:.3f} | {top3:.3f} | {top10:.3f} | {topp:.3f} | {mrr:.3f} | {kl:.3f} | {ppl_base:.2f} | {ppl_umim:.2f} |

Out of domain, {perplexity_rows} segments each:

| corpus | token reduction | PPL base | PPL UMIM |
|---|---|---|---|
| networkx + sympy docstrings | {ppl_token_reduction_ood_math:.1%} | {ppl_base_ood_math:.2f} | {ppl_umim_ood_math:.2f} |
| standard library docstrings | {ppl_token_reduction_ood_stdlib:.1%} | {ppl_base_ood_stdlib:.2f} | {ppl_umim_ood_stdlib:.2f} |

Source: docs/results/shipped.json (`{command}`, {machine}).
"""

# Parameters by (kind, depth, positions), of a module of size d.
FORMULAS = {
    ("attention", 1, "none"): "2d² + 7d",
    ("attention", 1, "learned"): "2d² + 11d",
    ("attention", 3, "none"): "10d² + 19d",
    ("attention", 3, "learned"): "10d² + 23d",
    ("linear", 1, "none"): "4d² + 3d",
}


def form(config: CheckpointConfig) -> str:
    """Return the form of a module in words."""
    placed = "" if config.unit_positions == "compact" else ", preserved unit positions"
    size = f"d {config.hidden_size}"
    if config.kind == "linear":
        return f"one linear layer over the span's embeddings side by side, {size}{placed}"
    layers = "attention pooling"
    if config.depth > 1:
        layers = f"{config.depth - 1} layers of self-attention over the span, then {layers}"
    heads = f"{size}, {config.num_heads} heads"
    return f"{layers}, {heads}, positions `{config.positions}`{placed}"


def origin(rules: RuleSet) -> str:
    """Return in words what made the rules."""
    if rules.source == "explicit":
        return "given as a list"
    spans = {
        "frequency": "mined on the docstring corpus at",
        "confidence": "spans of the docstring corpus that the backbone is confident about,",
    }
    return f"{spans[rules.source]} tau {rules.tau}"


def budget(recipe: Recipe) -> str:
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


def rendered(name: str) -> str:
    """Return the card of one checkpoint."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    metrics = results["checkpoints"][name]
    checkpoint = Checkpoint.load(name)
    recipe = validated(Recipe, read_recipe_file(RECIPE), RECIPE.name)
    return card(name, checkpoint, recipe, results, metrics)


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
    rules, module = checkpoint.rules, checkpoint.config
    return CARD.format(
        name=name,
        rules=len(rules),
        orders=", ".join(f"{count:,} of {n}" for n, count in rules.counts_by_order.items()),
        origin=origin(rules),
        overlap=rules.overlap,
        containment=rules.containment,
        length=rules.segment_length,
        form=form(module),
        formula=FORMULAS[module.kind, module.depth, module.positions],
        parameters=sum(p.numel() for p in checkpoint.module.parameters()),
        budget=budget(recipe),
        recipe=recipe.name,
        segment=recipe.segment_length,
        steps=module.training["steps"],
        best=module.training["best_step"],
        aligned=int(metrics["aligned_rows"]),
        alignment_rows=results["alignment_rows"],
        perplexity_rows=results["perplexity_rows"],
        command=results["command"],
        machine=results["machine"],
        **{key: value for key, value in metrics.items() if key != "aligned_rows"},
    )


def main() -> int:
    """Rewrite or check the cards."""
    names = json.loads(RESULTS.read_text(encoding="utf-8"))["checkpoints"]
    cards = {ASSETS / name / "README.md": rendered(name) for name in names}
    if "--check" in sys.argv[1:]:
        return int(any(not p.is_file() or p.read_text("utf-8") != c for p, c in cards.items()))
    for path, text in cards.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
