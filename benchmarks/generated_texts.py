"""Texts of the base model against texts of UMIM: repetition, diversity, similarity, perplexity.

    python -m benchmarks.generated_texts --checkpoints NAME=DIR --text test.txt --out RESULT.json

The paper's two tables of generated texts. Prompts are the beginnings of held-out documents:
docstrings, or the lines of a text file. Every decoding runs without merging (the base model), with
merged prompts, and with merged prompts and generated tokens. ``--max-damage`` bounds what merges
while decoding, for rules with prices; without it every rule merges.

Every text is compared with as many tokens as follow the prompt in its document: ROUGE, chrF, and
with stand-in features (hidden states of the checkpoint's backbone) BERTScore and MAUVE, whose names
say so: the published ones read other models.

Source: paper, "Generation Quality" (Rep-n, Dist-n, similarity); perplexity and cache figures are
ours.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.runner import Benchmark, Report, difference, named, save
from benchmarks.subjects import Ids, docstrings
from umim_core import UMIM
from umim_core.backbone.backbone import Backbone
from umim_core.cli.shared_options import text_of
from umim_core.config.form import Merge
from umim_core.embedded.assets import embedded_names
from umim_core.errors import CorpusError, MissingExtraError, require
from umim_core.evaluation.perplexity import perplexity
from umim_core.evaluation.text_metrics import BERTSCORE, TextFeatures, chrf, greedy_bertscore, rouge
from umim_core.inference.choice import end_ids
from umim_core.inference.options import GenerateOptions
from umim_core.inference.outputs import Row
from umim_core.merging.merged_model import MergedModel
from umim_core.store.artifacts import finite_or_none
from umim_core.text.tokens import tokenize_parts

DECODINGS: Final[dict[str, dict[str, Any]]] = {
    "greedy": {"do_sample": False},
    "top-p 0.9, temperature 0.8": {"do_sample": True, "top_p": 0.9, "temperature": 0.8},
    "plain sampling": {"do_sample": True, "top_p": 1.0, "temperature": 1.0},
}
MERGES: Final[tuple[Merge, ...]] = ("none", "prompt", "all")
REDUCTIONS: Final = ("token_reduction", "gen_kv_reduction", "cumulative_kv_reduction")
MAUVE: Final = "mauve_stand_in_features"
FEWEST_TEXTS: Final = 20  # of MAUVE: two clusters of ten, the library's own least
Similarities = dict[str, tuple[float, ...]]  # of each text, by figure
_SEED: Final = 25  # of the clusters' first centres; the library's own
_BATCH: Final = 16


def generate(
    umim: UMIM,
    prompts: Sequence[Ids],
    decoding: str,
    merge: Merge,
    seed: int,
    options: argparse.Namespace,
) -> list[Row]:
    """Generate from prompts of raw ids [P_b], in batches; the seed differs from batch to batch."""
    bounded, sampling = merge == "all" and options.max_damage is not None, DECODINGS[decoding]
    rows: list[Row] = []
    for first in range(0, len(prompts), options.batch_size):
        asked = GenerateOptions(
            max_new_tokens=options.new_tokens,
            eos_token_id=end_ids(umim.backbone) or None,
            merge=merge,
            seed=seed * len(prompts) + first if sampling["do_sample"] else None,
            decode_max_damage=options.max_damage if bounded else math.inf,
            **sampling,
        )
        rows += umim.engine.generate(prompts[first : first + options.batch_size], asked).rows
    return rows


def choose_prompts(texts: Sequence[str], umim: UMIM, count: int, length: int) -> list[Ids]:
    """Return the beginnings of documents that are spread evenly over the corpus."""
    tokenizer = umim.backbone.require_tokenizer()
    pieces = tokenize_parts(((text, True) for text in texts), tokenizer)
    long = [ids for ids, _ in pieces if len(ids) >= length]
    rule = f"{count} documents must have {length} tokens"
    require(len(long) >= count, CorpusError, rule, len(long))
    chosen = np.linspace(0, len(long) - 1, count).astype(np.int64)
    return [long[index][:length].astype(np.int64) for index in chosen]


def generation_quality(
    rows: Sequence[Row], backbone: Backbone, references: Sequence[str], features: TextFeatures
) -> tuple[dict[str, float], Similarities]:
    """Return figures of one set of generated texts by name, and similarities of each text.

    ``rep_N`` and ``dist_N`` are NaN if no text has N tokens, MAUVE is of the texts that are not
    empty, NaN of fewer than ``FEWEST_TEXTS``; reductions and similarities count as means over
    texts. These are the kinds of ROUGE, chrF (0..1) and BERTScore's F1 to the text's continuation;
    an empty text has 0.
    """
    texts = [row.ids for row in rows]
    whole = [np.array([*row.prompt_ids, *row.ids], dtype=np.int64) for row in rows]
    prompts = [len(row.prompt_ids) for row in rows]
    base = MergedModel.without_merging(backbone)
    decoded = [backbone.decode(list(text)) for text in texts]
    by_text, near = reference_similarity(decoded, references, features)
    figures = {
        **{f"rep_{n}": repetition(texts, n) for n in (2, 3, 4)},
        **{f"dist_{n}": distinct(texts, n) for n in (1, 2, 3, 4)},
        "ppl": perplexity(whole, base, _BATCH, prompts).ppl,
        "tokens": _mean([len(text) for text in texts]),
        **{name: _mean([getattr(row, name) for row in rows]) for name in REDUCTIONS},
        **{name: _mean(values) for name, values in by_text.items()},
        MAUVE: near,
    }
    return figures, by_text


def repetition(texts: Sequence[Sequence[int]], n: int) -> float:
    """Return Rep-n: the mean of 1 - different n-grams / all n-grams, over texts that have any."""
    by_text = [grams for text in texts if (grams := _grams(text, n))]
    return _mean([1.0 - len(set(grams)) / len(grams) for grams in by_text])


def distinct(texts: Sequence[Sequence[int]], n: int) -> float:
    """Return Dist-n: different n-grams / all n-grams of all texts together."""
    grams = [gram for text in texts for gram in _grams(text, n)]
    return len(set(grams)) / len(grams) if grams else math.nan


def _grams(text: Sequence[int], n: int) -> list[tuple[int, ...]]:
    return [tuple(text[start : start + n]) for start in range(len(text) - n + 1)]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def mauve(texts: NDArray[np.floating], references: NDArray[np.floating]) -> float:
    """Return MAUVE of two sets of texts, 0..1; larger is nearer. The same sets give the same value.

    A text has a feature vector: [n, d], references [m, d]. MAUVE's own are the last token's. There
    are a tenth as many clusters as references; the library's own choice is a tenth of the smaller
    set, which would differ between sets of texts that are compared with the same references.
    """
    clusters = max(2, round(len(references) / 10))
    result = mauve_library()(
        p_features=references, q_features=texts, num_buckets=clusters, seed=_SEED
    )
    return float(result.mauve)


def mauve_library() -> Any:
    try:
        from mauve import compute_mauve
    except ImportError as error:
        raise MissingExtraError(
            "MAUVE needs mauve-text", str(error), "pip install 'umim[metrics]'"
        ) from error
    return compute_mauve


def reference_similarity(
    texts: Sequence[str], references: Sequence[str], features: TextFeatures
) -> tuple[Similarities, float]:
    """Compare texts with the continuations of their prompts, one by one, and by MAUVE as sets."""
    states = features.of_tokens(texts), features.of_tokens(references)
    rows = [
        {
            **rouge([text], {"references": [reference]}),
            **chrf([text], {"references": [reference]}),
            BERTSCORE: greedy_bertscore(*of_pair),
        }
        for text, reference, *of_pair in zip(texts, references, *states, strict=True)
    ]
    last = [[text[-1] for text in part if len(text)] for part in states]
    enough = min(map(len, last)) >= FEWEST_TEXTS
    near = mauve(*(torch.stack(part).numpy() for part in last)) if enough else math.nan
    return {name: tuple(row[name] for row in rows) for name in rows[0]}, near


def over_seeds(runs: Sequence[dict[str, float]]) -> dict[str, dict[str, float | None]]:
    """Return mean and sample standard deviation of every figure; no deviation of one run."""
    summary = {}
    for name in runs[0]:
        values = [run[name] for run in runs]
        deviation = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
        summary[name] = {
            "mean": finite_or_none(float(np.mean(values))),
            "std": finite_or_none(deviation),
        }
    return summary


def by_prompt(runs: Sequence[Similarities]) -> dict[str, list[float]]:
    """Return the similarity to its reference of every prompt's text by figure, mean over seeds."""
    return {name: np.mean([run[name] for run in runs], axis=0).tolist() for name in runs[0]}


def run(options: argparse.Namespace, report: Report) -> None:
    if options.prompts >= FEWEST_TEXTS:
        mauve_library()  # before minutes of generating
    names = ("prompt_tokens", "new_tokens", "seeds", "max_damage")
    report |= {name: getattr(options, name) for name in names} | {"subjects": {}}
    models = {
        name: UMIM.from_pretrained(where, backbone=options.backbone, dtype="float32")
        for name, where in map(named, options.checkpoints)
    }
    if options.max_damage is not None:
        for umim in models.values():
            umim.rules.require_prices()
    if options.text is None:
        texts = docstrings("test")
    else:
        texts = text_of(options.text, "--text").splitlines()
    length = options.prompt_tokens + options.new_tokens
    for name, umim in models.items():
        own = TextFeatures(umim.backbone)
        beginnings = choose_prompts(texts, umim, options.prompts, length)
        prompts = [ids[: options.prompt_tokens] for ids in beginnings]
        rest = [umim.backbone.decode(ids[options.prompt_tokens :].tolist()) for ids in beginnings]
        rows: list[Report] = []
        report["subjects"][name] = {"features": own.label, "prompts": options.prompts, "rows": rows}
        for decoding, merge in product(DECODINGS, MERGES):
            seeds = range(options.seeds if DECODINGS[decoding]["do_sample"] else 1)
            made = (generate(umim, prompts, decoding, merge, seed, options) for seed in seeds)
            runs = [generation_quality(written, umim.backbone, rest, own) for written in made]
            figures, by_text = zip(*runs, strict=True)
            row: Report = {"decoding": decoding, "merge": merge, "runs": len(runs)}
            row |= {"metrics": over_seeds(figures), "by_prompt": by_prompt(by_text)}
            if merge != MERGES[0]:
                base = rows[-MERGES.index(merge)]["by_prompt"]
                row["differences"] = {
                    figure: difference(values, base[figure])
                    for figure, values in row["by_prompt"].items()
                }
            rows.append(row)
            save(report, options.out)


BENCHMARK: Final = Benchmark(
    options={
        "checkpoints": {"nargs": "+", "default": embedded_names(), "metavar": "[NAME=]PATH"},
        "backbone": str,
        "text": Path,
        "prompts": 64,
        "prompt_tokens": 100,
        "new_tokens": 100,
        "seeds": 5,
        "max_damage": float,
        "batch_size": 32,
    },
    measure=run,
)


if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
