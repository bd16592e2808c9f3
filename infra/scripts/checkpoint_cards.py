"""Write the model cards of the shipped merge checkpoints from a committed result file.

python infra/scripts/checkpoint_cards.py            rewrite the cards
python infra/scripts/checkpoint_cards.py --check    exit 1 if one is out of date
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from umim_core.checkpoint import Checkpoint  # noqa: E402  (the checkout is not installed)

RESULTS = ROOT / "docs" / "results" / "shipped.json"
ASSETS = ROOT / "umim_core" / "embedded" / "assets"
CARD = """\
---
license: apache-2.0
library_name: umim
---
# {name}

A UMIM merge checkpoint (`checkpoint/`: merge module and rules) for the frozen backbone `{name}` (`backbone/`, with a card of its own).

- **Rules**: {rules:,} spans ({orders}), mined on the docstring corpus at tau {tau}, overlap `{overlap}`, containment `{containment}`, segments
  of {length} tokens.
- **Module**: attention pooling, d {d}, {heads} heads, positions `{positions}`, {parameters:,} parameters (2d² + 7d).
- **Training**: predictive distillation, {steps} steps of 8 segments of 512 tokens, AdamW 2e-3, bfloat16 products, one CPU core; selected by
  validation cross-entropy (step {best}). `python -m flows run shipped` makes it again.

Measured on the held-out test split of the same corpus (alignment on {alignment_rows} segments of 512, {aligned:,} aligned rows; perplexity on
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


def rendered(name: str) -> str:
    """Return the card of one checkpoint."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    metrics = results["checkpoints"][name]
    checkpoint = Checkpoint.load(name)
    rules, module = checkpoint.rules, checkpoint.config
    return CARD.format(
        name=name,
        rules=len(rules),
        orders=", ".join(f"{count:,} of {n}" for n, count in rules.counts_by_order.items()),
        tau=rules.tau,
        overlap=rules.overlap,
        containment=rules.containment,
        length=rules.segment_length,
        d=module.hidden_size,
        heads=module.num_heads,
        positions=module.positions,
        parameters=sum(p.numel() for p in checkpoint.module.parameters()),
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
    for path, card in cards.items():
        path.write_text(card, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
