"""Texts and attention as the paper shows them: of the base model, and of UMIM with merged spans.

    python -m benchmarks.examples --out docs/results/examples-smollm2.json

The attention of the last layer, its mean over heads, is that of the first prompt, before and after
merging on the same units: attention to the tokens of a span adds up, and the query of a span is its
last token, where both paths predict the same next token. Every row still sums to 1. The cosine of
surrogates with their tokens' embeddings is over the merged spans of all prompts: near zero, the
module learned something other than a copy or a mean of them, and tokens drawn at random give zero a
scale.

Source: paper, figure "attention distributions before and after merging" and "Qualitative Analysis"
(near-zero cosine similarity with the constituent tokens).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cosine_similarity

from benchmarks.runner import Benchmark, Report
from umim_core import UMIM
from umim_core.backbone.attention_masks import check_attention_window, eager_attention
from umim_core.backbone.backbone import Backbone
from umim_core.config.form import Merge
from umim_core.merging.merged_model import MergedModel
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
Map = NDArray[np.float64]


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


@torch.no_grad()
def attention_maps(row: NDArray[np.int64], merged_model: MergedModel) -> tuple[Map, Map, list[int]]:
    """Read a text of raw ids [T], at least one, and return where the last layer looks.

    The backbone's attention is eager meanwhile: not for use during a generation.

    Returns:
        Mean attention over heads [S, S] (query, key): raw, the tokens of a unit added up, and
        merged; the raw tokens of each unit [S].
    """
    backbone = merged_model.backbone
    check_attention_window(backbone.model.config, len(row))
    packed = merged_model.pack([row])
    lengths, starts = packed.lengths[0], packed.starts[0]
    units = torch.arange(len(starts), device=backbone.device)
    positions = packed.position_ids(merged_model.unit_positions)[0]
    raw = backbone.embed(torch.from_numpy(row)[None].to(backbone.device))
    with eager_attention(backbone.model):
        after = _attention(backbone, merged_model.embed(packed), positions)
        before = _attention(backbone, raw, torch.arange(len(row)).to(positions))
    before = before[:, starts + lengths - 1]  # the last token of each unit asks
    member = torch.repeat_interleave(units, lengths)
    summed = before.new_zeros(len(before), len(starts), len(starts)).index_add(2, member, before)
    before_mean, after_mean = (weights.mean(dim=0).cpu().numpy() for weights in (summed, after))
    return before_mean, after_mean, lengths.tolist()


def _attention(backbone: Backbone, embeddings: Tensor, positions: Tensor) -> Tensor:
    """Return the weights [H, L, L] of the last layer for embeddings [1, L, d]."""
    out = backbone.model.base_model(
        inputs_embeds=embeddings,
        # without a mask, transformers would take a row whose positions jump for several sequences
        attention_mask=embeddings.new_ones(embeddings.shape[:2], dtype=torch.int64),
        position_ids=positions[None],
        use_cache=False,
        output_attentions=True,
    )
    weights: Tensor = out.attentions[-1][0]
    return weights.double()


@torch.no_grad()
def surrogate_similarity(
    texts: Iterable[NDArray[np.int64]], merged_model: MergedModel
) -> list[Report]:
    """Compare z(span) of the merged spans of texts [T] with its tokens' embeddings, by order.

    Mean cosines of the ``spans`` of an ``order`` of n tokens are ``by_offset`` [n], with the token
    at each offset, ``mean``, with the mean of the span's embeddings, and ``random``, with that of a
    random token.
    """
    backbone, generator = merged_model.backbone, np.random.default_rng(0)
    cuts = [(ids, *merged_model.segment(ids)) for ids in texts]
    found = {
        tuple(ids[start : start + n].tolist())
        for ids, starts, lengths in cuts
        for start, n in zip(starts, lengths, strict=True)
        if n > 1
    }
    similarities = []
    for order in sorted(set(map(len, found))):
        spans = sorted(span for span in found if len(span) == order)
        ids = torch.tensor(spans, device=backbone.device)
        merged = merged_model.surrogates(ids, torch.full((len(spans),), order).to(ids))
        tokens = backbone.embed(ids)
        drawn = generator.integers(0, backbone.vocab_size, len(spans))
        alone = backbone.embed(torch.from_numpy(drawn).to(ids))
        row = {
            "order": order,
            "spans": len(spans),
            "by_offset": [_cosine(merged, tokens[:, offset]) for offset in range(order)],
            "mean": _cosine(merged, tokens.mean(dim=1)),
            "random": _cosine(merged, alone),
        }
        similarities.append(row)
    return similarities


def _cosine(left: Tensor, right: Tensor) -> float:
    """Return the mean cosine of paired rows [M, d]."""
    return float(cosine_similarity(left.cpu().double(), right.cpu().double(), dim=-1).mean())


def run(options: argparse.Namespace, report: Report) -> None:
    umim = UMIM.from_pretrained(options.checkpoint, dtype="float32")
    names = ("checkpoint", "new_tokens")
    report |= {name: getattr(options, name) for name in names}
    report["backbone"] = umim.backbone.name
    seeds = range(_SEEDS)
    report["greedy"] = [continuation(umim, each, options.new_tokens, None) for each in PROMPTS]
    report["sampled"] = [continuation(umim, PROMPTS[0], options.new_tokens, n) for n in seeds]
    prompts = [np.array(umim.backbone.encode(each), np.int64) for each in PROMPTS]
    before, after, lengths = attention_maps(prompts[0], umim.merged_model)
    report["attention"] = {
        "label": f"{options.checkpoint}, layer {umim.backbone.num_layers}, mean over heads",
        "units": unit_texts(prompts[0].tolist(), lengths, umim.backbone.decode),
        "tokens": lengths,
        "before": before.tolist(),
        "after": after.tolist(),
    }
    report["similarity"] = surrogate_similarity(prompts, umim.merged_model)


BENCHMARK: Final = Benchmark(
    options={"checkpoint": "umim-smollm2-135m", "new_tokens": 48},
    measure=run,
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
