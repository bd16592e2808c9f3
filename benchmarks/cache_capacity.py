"""Cache memory and batch capacity at equal memory: base against UMIM, measured on held-out text.

    python -m benchmarks.cache_capacity --out docs/results/cache_capacity.json

Prompts of several lengths are consecutive windows of held-out docstrings; 128 tokens are generated
from each. What a row needs is the most entries that its cache held at once; only the finished run
tells. The engine does not know it: it lets a row grow to its limit, the units of the longest prompt
+ the new tokens - 1. How many rows fit into the budget follows for both, and is checked: that many
rows are allocated in a ``RowCache``, whose buffers must stay within the budget, and one row more
must not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.common import Benchmark, Report
from benchmarks.corpus import CACHE, held_out_texts
from benchmarks.generation_quality.text_runs import MERGES, generate
from umim_core import UMIM
from umim_core.backbone.backbone import Backbone
from umim_core.backbone.row_cache import RowCache
from umim_core.config.form import Merge
from umim_core.embedded.assets import embedded_names
from umim_core.errors import NumericalError
from umim_core.text.tokens import tokenize_documents

PROMPT_LENGTHS: Final = (256, 512, 1024)
NEW_TOKENS: Final = 128
_MIB: Final = 1 << 20
Ids = NDArray[np.int64]


def unit_bytes(backbone: Backbone) -> int:
    """Return the bytes of one cache entry: key and value of every layer and key/value head."""
    heads, size = _key_value_shape(backbone)
    width = torch.finfo(backbone.dtype).bits // 8
    return int(backbone.model.config.num_hidden_layers) * 2 * heads * size * width


def allocated_bytes(backbone: Backbone, rows: int, columns: int) -> int:
    """Fill a cache of ``rows`` rows with ``columns`` entries each and return its buffers' bytes."""
    heads, size = _key_value_shape(backbone)
    layers = backbone.model.config.num_hidden_layers
    cache = RowCache(layers, rows, columns, backbone.device)
    # One state seen as many: what is counted must be the cache's own memory.
    states = torch.zeros(1, heads, 1, size, dtype=backbone.dtype, device=backbone.device)
    states = states.expand(rows, heads, columns, size)
    cache.begin(columns)
    for layer in range(layers):
        cache.update(states, states, layer)
    cache.commit(torch.full((rows,), columns))
    buffers = [buffer for layer in cache.layers for buffer in (layer.keys, layer.values)]
    return sum(buffer.nbytes for buffer in buffers if buffer is not None)


def capacity(backbone: Backbone, columns: int, budget: int) -> tuple[int, int]:
    """Return how many rows of ``columns`` entries fit into a budget, and what they allocate.

    Args:
        backbone: Whose cache it is.
        columns: Entries per row.
        budget: Bytes.

    Raises:
        NumericalError: If the real buffers do not agree with the computed capacity.
    """
    rows = budget // (columns * unit_bytes(backbone))
    taken = allocated_bytes(backbone, rows, columns) if rows else 0
    more = allocated_bytes(backbone, rows + 1, columns)
    if not taken <= budget < more:
        raise NumericalError(
            f"{rows} rows must fit into {budget} bytes, and one more must not",
            f"{taken} and {more} bytes",
            "Compare unit_bytes with the layout of RowCache.",
        )
    return rows, taken


def entries(
    umim: UMIM, prompts: Sequence[Ids], merge: Merge, new: int, batch_size: int
) -> tuple[list[int], int]:
    """Return the most entries that each row's cache held, and how many the engine allowed a row."""
    settings = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None}
    rows = generate(umim, prompts, merge, batch_size, **settings)
    # The last token chosen is never fed.
    limit = max(row.prompt_units + new - 1 for row in rows)
    return [max(row.cache_lengths) for row in rows], limit


def measure(
    umim: UMIM,
    ids: Ids,
    *,
    lengths: Sequence[int] = PROMPT_LENGTHS,
    prompts: int,
    new_tokens: int = NEW_TOKENS,
    budget: int,
    batch_size: int,
) -> Report:
    """Measure one model.

    Args:
        umim: Backbone, module and rules.
        ids: Held-out ids [T], cut into consecutive prompts.
        lengths: Tokens per prompt; one that does not fit the positions unmerged is skipped.
        prompts: Prompts per length.
        new_tokens: Tokens generated from each.
        budget: Bytes of cache.
        batch_size: Rows per forward.
    """
    backbone = umim.backbone
    positions = backbone.max_positions
    fitting = [n for n in lengths if positions is None or n + new_tokens - 1 <= positions]
    rows = []
    for length in fitting:
        if len(ids) < prompts * length:
            raise SystemExit(f"{len(ids)} held-out tokens are too few for {prompts} x {length}")
        cut = list(ids[: prompts * length].reshape(prompts, length))
        for merge in MERGES:
            held, limit = entries(umim, cut, merge, new_tokens, batch_size)
            mean, longest = float(np.mean(held)), max(held)
            fit, taken = capacity(backbone, longest, budget)
            fit_limit, taken_limit = capacity(backbone, limit, budget)
            rows.append(
                {
                    "prompt_tokens": length,
                    "merge": merge,
                    "units_mean": mean,
                    "units_longest": longest,
                    "units_limit": limit,
                    "bytes_mean": mean * unit_bytes(backbone),
                    "sequences_mean": int(budget // (mean * unit_bytes(backbone))),
                    "sequences": fit,
                    "allocated_bytes": taken,
                    "sequences_limit": fit_limit,
                    "allocated_bytes_limit": taken_limit,
                }
            )
    return {
        "positions": positions,
        "unit_bytes": unit_bytes(backbone),
        "skipped": [length for length in lengths if length not in fitting],
        "rows": rows,
    }


def _key_value_shape(backbone: Backbone) -> tuple[int, int]:
    """Return key/value heads and head size."""
    config = backbone.model.config
    heads = int(config.num_attention_heads)
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return int(getattr(config, "num_key_value_heads", None) or heads), int(size)


def run(options: argparse.Namespace, report: Report) -> None:
    """Measure every checkpoint."""
    budget = options.budget_mib * _MIB
    report |= {"budget_bytes": budget, "prompts": options.prompts}
    report |= {"new_tokens": options.new_tokens, "subjects": {}}
    texts = held_out_texts(options.cache)
    for name in options.checkpoints:
        umim = UMIM.from_pretrained(name, dtype="float32")
        tokenizer = umim.backbone.require_tokenizer()
        ids = np.concatenate(list(tokenize_documents(texts, tokenizer))).astype(np.int64)
        report["subjects"][name] = measure(
            umim,
            ids,
            lengths=options.lengths,
            prompts=options.prompts,
            new_tokens=options.new_tokens,
            budget=budget,
            batch_size=options.batch_size,
        )


main = Benchmark(
    name="cache_capacity",
    doc=__doc__,
    options={
        "checkpoints": embedded_names(),
        "lengths": list(PROMPT_LENGTHS),
        "prompts": 16,
        "new_tokens": NEW_TOKENS,
        "budget_mib": 64,
        "batch_size": 8,
        "cache": CACHE,
    },
    measure=run,
).main


if __name__ == "__main__":
    sys.exit(main())
