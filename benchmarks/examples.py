"""Texts and attention as the paper shows them: of the base model, and of UMIM with merged spans.

    python -m benchmarks.examples --out docs/results/examples-smollm2.json

Prompts of ours are continued greedily, and the first one is sampled with three seeds (top-p 0.9,
temperature 0.8). UMIM merges prompt and generated tokens; ``[with respect to]`` is a merged span.
The attention of the last layer, its mean over heads, is that of the first prompt; the cosine of
surrogates with their tokens is over the merged spans of all prompts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.qualitative import attention_maps, surrogate_similarity
from benchmarks.runner import Benchmark, Report
from umim_core import UMIM
from umim_core.config.form import Merge
from umim_core.model.showing import Piece, unit_texts

PROMPTS: Final = (
    "At the end of the day, most of the people in the city of New York go home by train. One of "
    "the first things that they do is",
    "The history of the United States in the first half of the nineteenth century is, in a number "
    "of ways, the history of",
    "In order to make a cup of tea, you need a cup, hot water and some leaves. First of all,",
    "With respect to the weather, the west coast of Scotland is known for",
    "A committee of the European Union has published a report on the use of water in",
)
SAMPLED: Final[dict[str, Any]] = {"do_sample": True, "top_p": 0.9, "temperature": 0.8}
_SEEDS: Final = 3


def bracketed(pieces: Iterable[Piece]) -> str:
    """Return a text on one line with its merged spans in brackets."""
    shown = [
        f"{' ' if piece.text.startswith(' ') else ''}[{piece.text.strip()}]"
        if piece.tokens > 1
        else piece.text
        for piece in pieces
    ]
    return " ".join("".join(shown).split())


def continuation(umim: UMIM, prompt: str, new_tokens: int, seed: int | None) -> Report:
    """Return the texts of both sides behind a prompt; greedy ones without a seed."""
    drawn = {"do_sample": False} if seed is None else SAMPLED | {"seed": seed}
    row: Report = {"decoding": "greedy" if seed is None else f"top-p, seed {seed}"}
    sides: dict[str, Merge] = {"base": "none", "UMIM": "all"}
    for side, merge in sides.items():
        output = umim.generate(prompt, merge=merge, raw_tail=0, max_new_tokens=new_tokens, **drawn)
        (view,) = output.views
        row["prompt"] = bracketed(piece for piece in view.pieces if piece.prompt)
        row[side] = bracketed(piece for piece in view.pieces if not piece.prompt)
    return row | {
        "token_reduction": output.token_reduction[0],
        "gen_kv_reduction": output.gen_kv_reduction[0],
    }


def attention_example(umim: UMIM, ids: NDArray[np.int64], label: str) -> Report:
    """Return the last layer's attention over a text's [T] tokens and over its units."""
    before, after, lengths = attention_maps(ids, umim.merged_model)
    return {
        "label": f"{label}, layer {umim.backbone.num_layers}, mean over heads",
        "units": unit_texts(ids.tolist(), lengths, umim.backbone.decode),
        "tokens": lengths,
        "before": before.tolist(),
        "after": after.tolist(),
    }


def span_similarity(umim: UMIM, texts: Sequence[NDArray[np.int64]]) -> list[dict[str, Any]]:
    """Return the similarities of the merged spans of texts [T] with their tokens, by order."""
    spans = set()
    for ids in texts:
        starts, lengths = umim.matcher.segment(ids)
        cuts = zip(starts, lengths, strict=True)
        spans |= {tuple(ids[start : start + n].tolist()) for start, n in cuts if n > 1}
    return surrogate_similarity(sorted(spans), umim.merged_model)


def run(options: argparse.Namespace, report: Report) -> None:
    umim = UMIM.from_pretrained(options.checkpoint, dtype="float32")
    names = ("checkpoint", "new_tokens")
    report |= {name: getattr(options, name) for name in names}
    report["backbone"] = umim.backbone.name
    seeds = range(_SEEDS)
    report["greedy"] = [continuation(umim, each, options.new_tokens, None) for each in PROMPTS]
    report["sampled"] = [continuation(umim, PROMPTS[0], options.new_tokens, n) for n in seeds]
    prompts = [np.array(umim.backbone.encode(each), np.int64) for each in PROMPTS]
    report["attention"] = attention_example(umim, prompts[0], options.checkpoint)
    report["similarity"] = span_similarity(umim, prompts)


BENCHMARK: Final = Benchmark(
    name="examples",
    doc=__doc__,
    options={"checkpoint": "umim-smollm2-135m", "new_tokens": 48},
    measure=run,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
