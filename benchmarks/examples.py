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
from collections.abc import Sequence
from typing import Any, Final

from benchmarks.common import Benchmark, Report
from umim_core import UMIM
from umim_core.config.form import Merge
from umim_core.evaluation.attention_maps import attention_maps
from umim_core.evaluation.surrogate_similarity import surrogate_similarity
from umim_core.inference.outputs import Spans
from umim_core.model.showing import unit_texts

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


def bracketed(ids: Sequence[int], spans: Spans, umim: UMIM) -> str:
    """Return a text on one line with its merged spans in brackets.

    Args:
        ids: Raw ids [T].
        spans: Merged spans as (start, length); one that begins before the text is left out.
        umim: Decodes.
    """
    at = {start: length for start, length in spans if start >= 0}
    lengths, place = [], 0
    while place < len(ids):
        lengths.append(at.get(place, 1))
        place += lengths[-1]
    texts = unit_texts(ids, lengths, umim.backbone.decode)
    shown = [
        f"{' ' if text.startswith(' ') else ''}[{text.strip()}]" if length > 1 else text
        for text, length in zip(texts, lengths, strict=True)
    ]
    return " ".join("".join(shown).split())


def continuation(umim: UMIM, prompt: str, new_tokens: int, seed: int | None) -> Report:
    """Return the texts of both sides behind a prompt; greedy ones without a seed."""
    drawn = {"do_sample": False} if seed is None else SAMPLED | {"seed": seed}
    row: Report = {"decoding": "greedy" if seed is None else f"top-p, seed {seed}"}
    sides: dict[str, Merge] = {"base": "none", "UMIM": "all"}
    for side, merge in sides.items():
        output = umim.generate(prompt, merge=merge, raw_tail=0, max_new_tokens=new_tokens, **drawn)
        row["prompt"] = bracketed(output.prompt_ids[0], output.prompt_spans[0], umim)
        row[side] = bracketed(output.ids[0], output.generated_spans[0], umim)
    return row | {
        "token_reduction": output.token_reduction[0],
        "gen_kv_reduction": output.gen_kv_reduction[0],
    }


def run(options: argparse.Namespace, report: Report) -> None:
    """Generate, and measure attention and cosines."""
    umim = UMIM.from_pretrained(options.checkpoint, dtype="float32")
    names = ("checkpoint", "new_tokens")
    report |= {name: getattr(options, name) for name in names}
    report["backbone"] = umim.backbone.name
    seeds = range(_SEEDS)
    report["greedy"] = [continuation(umim, each, options.new_tokens, None) for each in PROMPTS]
    report["sampled"] = [continuation(umim, PROMPTS[0], options.new_tokens, n) for n in seeds]
    prompts = [umim.backbone.encode(each) for each in PROMPTS]
    maps = attention_maps(prompts[0], umim.compressed)
    report["attention"] = {
        "label": f"{options.checkpoint}, layer {maps.layer + 1}, mean over heads",
        "units": unit_texts(prompts[0], maps.lengths, umim.backbone.decode),
        "tokens": maps.lengths,
        "before": maps.before.round(5).tolist(),
        "after": maps.after.round(5).tolist(),
    }
    spans = set()
    for ids in prompts:
        starts, lengths = umim.matcher.segment(ids)
        cut = zip(starts, lengths, strict=True)
        spans |= {tuple(ids[start : start + n]) for start, n in cut if n > 1}
    report["similarity"] = [
        vars(row) for row in surrogate_similarity(sorted(spans), umim.compressed)
    ]


main = Benchmark(
    name="examples",
    doc=__doc__,
    options={"checkpoint": "umim-smollm2-135m", "new_tokens": 48},
    measure=run,
).main


if __name__ == "__main__":
    sys.exit(main())
