"""Texts of the base model against texts of UMIM: repetition, diversity, similarity, perplexity.

    python -m benchmarks.generated_texts --checkpoints NAME=DIR --text test.txt --out RESULT.json

The paper's two tables of generated texts. Prompts are the first 100 tokens of held-out documents
that have 200 or more: docstrings, or the lines of a text file. Every decoding runs without merging
(the base model), with merged prompts, and with merged prompts and generated tokens. Up to 100
tokens follow; an end-of-sequence token ends a text. Sampling is repeated with several seeds; greedy
decoding draws nothing and is one run. The perplexity is that of the generated tokens under the base
model, given the prompt. Every text is compared with as many tokens as follow the prompt in its
document: ROUGE, chrF, and with stand-in features BERTScore and MAUVE (hidden states of the
checkpoint's backbone, or of ``--features``). ``--max-damage`` bounds what merges while decoding,
for rules with prices; without it every rule merges.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.answers import difference
from benchmarks.runner import Benchmark, Report, named, save
from benchmarks.text_quality import (
    FEWEST_TEXTS,
    GenerationQuality,
    generation_quality,
    mauve_library,
)
from umim_core import UMIM
from umim_core.cli.shared_options import text_of
from umim_core.config.form import Merge
from umim_core.embedded.assets import embedded_names
from umim_core.embedded.docstring_corpus import build_corpus, read_documents
from umim_core.evaluation.text_metrics import TextFeatures, features_of
from umim_core.inference.choice import end_ids
from umim_core.inference.options import GenerateOptions
from umim_core.inference.outputs import Row
from umim_core.store.artifacts import finite_or_none
from umim_core.text.tokens import tokenize_parts

DECODINGS: Final[dict[str, dict[str, Any]]] = {
    "greedy": {"do_sample": False},
    "top-p 0.9, temperature 0.8": {"do_sample": True, "top_p": 0.9, "temperature": 0.8},
    "plain sampling": {"do_sample": True, "top_p": 1.0, "temperature": 1.0},
}
MERGES: Final[tuple[Merge, ...]] = ("none", "prompt", "all")
Ids = NDArray[np.int64]


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


def held_out_docstrings() -> list[str]:
    """Return the test split of the docstring corpus, which nothing that ships has seen."""
    with TemporaryDirectory(prefix="docstrings-") as folder:
        build_corpus(Path(folder) / "built", workers=2)
        return [one.text for one in read_documents(Path(folder) / "built" / "test.jsonl")]


def choose_prompts(texts: Sequence[str], umim: UMIM, count: int, length: int) -> list[Ids]:
    """Return the beginnings of documents that are spread evenly over the corpus."""
    tokenizer = umim.backbone.require_tokenizer()
    pieces = tokenize_parts(((text, True) for text in texts), tokenizer)
    long = [ids for ids, _ in pieces if len(ids) >= length]
    if len(long) < count:
        raise SystemExit(f"only {len(long)} documents have {length} tokens, {count} are wanted")
    chosen = np.linspace(0, len(long) - 1, count).astype(np.int64)
    return [long[index][:length].astype(np.int64) for index in chosen]


def over_seeds(runs: Sequence[GenerationQuality]) -> dict[str, dict[str, float | None]]:
    """Return mean and sample standard deviation of every figure; no deviation of one run."""
    summary = {}
    for name in runs[0].figures:
        values = [run.figures[name] for run in runs]
        deviation = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
        summary[name] = {
            "mean": finite_or_none(float(np.mean(values))),
            "std": finite_or_none(deviation),
        }
    return summary


def by_prompt(runs: Sequence[GenerationQuality]) -> dict[str, list[float]]:
    """Return the similarity to its reference of every prompt's text by figure, mean over seeds."""
    return {
        name: np.mean([run.by_text[name] for run in runs], axis=0).tolist()
        for name in runs[0].by_text
    }


def run(options: argparse.Namespace, report: Report) -> None:
    """Measure every checkpoint; every row is written at once."""
    if options.prompts >= FEWEST_TEXTS:
        mauve_library()  # before minutes of generating
    features = None if options.features is None else features_of(options.features)
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
        texts = held_out_docstrings()
    else:
        texts = text_of(options.text, "--text").splitlines()
    length = options.prompt_tokens + options.new_tokens
    for name, umim in models.items():
        own = features or TextFeatures(umim.backbone)
        beginnings = choose_prompts(texts, umim, options.prompts, length)
        prompts = [ids[: options.prompt_tokens] for ids in beginnings]
        rest = [umim.backbone.decode(ids[options.prompt_tokens :].tolist()) for ids in beginnings]
        rows: list[Report] = []
        report["subjects"][name] = {"features": own.label, "prompts": options.prompts, "rows": rows}
        for decoding, merge in product(DECODINGS, MERGES):
            seeds = range(options.seeds if DECODINGS[decoding]["do_sample"] else 1)
            made = (generate(umim, prompts, decoding, merge, seed, options) for seed in seeds)
            runs = [generation_quality(written, umim.backbone, rest, own) for written in made]
            row: Report = {"decoding": decoding, "merge": merge, "runs": len(runs)}
            row |= {"metrics": over_seeds(runs), "by_prompt": by_prompt(runs)}
            if merge != MERGES[0]:
                base = rows[-MERGES.index(merge)]["by_prompt"]
                row["differences"] = {
                    figure: difference(values, base[figure])
                    for figure, values in row["by_prompt"].items()
                }
            rows.append(row)
            save(report, options.out)


BENCHMARK: Final = Benchmark(
    name="generated_texts",
    doc=str(__doc__),
    options={
        "checkpoints": {"nargs": "+", "default": embedded_names(), "metavar": "[NAME=]PATH"},
        "backbone": str,
        "features": str,
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
    sys.exit(BENCHMARK.main())
