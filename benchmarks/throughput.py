"""Prefill and decode throughput of base and UMIM: a table, then one JSON line.

    python benchmarks/throughput.py --checkpoint umim-docs-llama --lengths 256 512 --new-tokens 64

Gates (docs: PERFORMANCE, P4, CPU): prefill >= 0.9 of the bound from 512 tokens on, decode >= 0.98
of the base model. ``equal`` says that the engine without rules gave the ids of
``transformers.generate``. A figure above the device's roofline ends the run with an error.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import GenerationConfig

from umim_core.backbone import Backbone
from umim_core.benchmarking.throughput import ThroughputRow, measure_throughput
from umim_core.merging.engine import Engine
from umim_core.merging.model import UMIM

PREFILL_SHARE_OF_BOUND = 0.9
PREFILL_FROM_TOKENS = 512
DECODE_RATIO = 0.98


def sample_text() -> str:
    """Prose that every installation has: the docstrings of numpy's functions."""
    names = sorted(name for name in dir(np) if not name.startswith("_"))
    return "\n\n".join(str(getattr(np, name).__doc__) for name in names)


def same_as_transformers(backbone: Backbone, prompt: np.ndarray, new_tokens: int) -> bool:
    """Compare greedy ids of our engine without rules with ``transformers.generate``."""
    config = GenerationConfig(max_new_tokens=new_tokens, do_sample=False)
    ours = Engine(backbone, None, None).generate([prompt], config).rows[0].ids
    ids = torch.tensor(prompt[None], device=backbone.device)
    with torch.no_grad():
        theirs = backbone.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return list(ours) == theirs[0, len(prompt) :].tolist()


def gates(rows: list[ThroughputRow]) -> dict[str, tuple[float, float, bool]]:
    """Return value, limit and verdict of every gate that applies."""
    found = {}
    for row in rows:
        if row.phase == "prefill" and row.prompt_tokens >= PREFILL_FROM_TOKENS:
            limit = PREFILL_SHARE_OF_BOUND * row.bound
        elif row.phase == "decode":
            limit = DECODE_RATIO
        else:
            continue
        found[f"{row.phase}_{row.rules}_{row.prompt_tokens}"] = (
            round(row.speedup, 4),
            round(limit, 4),
            row.speedup >= limit,
        )
    return found


def table(rows: list[ThroughputRow]) -> str:
    """Return the rows for people."""
    head = (
        "phase    rules        prompt  TR     base tok/s  UMIM tok/s  speed-up (quartiles)  bound"
    )
    lines = [
        f"{r.phase:<8} {r.rules:<12} {r.prompt_tokens:>6}  {r.token_reduction:>5.1%} "
        f"{r.base_tokens_per_s:>11,.0f} {r.umim_tokens_per_s:>11,.0f}  "
        f"{r.speedup:>5.2f} ({r.speedup_low:.2f}-{r.speedup_high:.2f})     {r.bound:>5.2f}"
        for r in rows
    ]
    return "\n".join([head, *lines])


def main() -> int:
    """Run the benchmark; 0 unless an output differed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", default="umim-docs-llama", help="name or directory")
    parser.add_argument("--text", type=Path, help="UTF-8 text to cut prompts from")
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()

    umim = UMIM.from_pretrained(options.checkpoint, dtype=options.dtype, device=options.device)
    text = options.text.read_text(encoding="utf-8") if options.text else sample_text()
    ids = np.array(umim.backbone.encode(text), dtype=np.int64)
    rows = measure_throughput(
        umim.backbone,
        umim.module,
        umim.matcher,
        ids,
        prompt_lengths=options.lengths,
        new_tokens=options.new_tokens,
        batch_size=options.batch_size,
        warmup=options.warmup,
        pairs=options.pairs,
    )
    equal = all(
        same_as_transformers(umim.backbone, ids[:length], options.new_tokens)
        for length in options.lengths
    )
    print(table(rows))
    report = {"gates": gates(rows), "equal": equal, "rows": [row.as_dict() for row in rows]}
    print(json.dumps(report))
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
