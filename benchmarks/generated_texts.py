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
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.runner import Benchmark, Report, save
from umim_core import UMIM
from umim_core.config.form import Merge
from umim_core.embedded.assets import embedded_names
from umim_core.embedded.docstring_corpus import build_corpus, read_documents
from umim_core.evaluation.generation_quality import (
    FEWEST_TEXTS,
    GenerationQuality,
    generation_quality,
    mauve_library,
)
from umim_core.evaluation.paired_differences import mean_difference_error
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


@dataclass(frozen=True)
class Subject:
    """One model under measurement.

    Attributes:
        umim: Backbone, module and rules.
        prompts: Raw ids of the prompts [P_b] each.
        new_tokens: Most tokens to generate from each.
        batch_size: Prompts of a batch.
        max_damage: Bound on the price of rules that merge while decoding; infinite for all rules.
        references: What follows the prompts in the held-out text, compared by ``features``.
    """

    umim: UMIM
    prompts: list[Ids]
    new_tokens: int
    batch_size: int
    max_damage: float
    references: Sequence[str]
    features: TextFeatures

    def generate(self, decoding: str, merge: Merge, seed: int) -> list[Row]:
        """Generate from every prompt, in batches; the seed differs from batch to batch."""
        bound = self.max_damage if merge == "all" else math.inf
        rows: list[Row] = []
        for first in range(0, len(self.prompts), self.batch_size):
            batch = self.prompts[first : first + self.batch_size]
            sampling = DECODINGS[decoding]
            drawn = seed * len(self.prompts) + first if sampling["do_sample"] else None
            options = GenerateOptions(
                max_new_tokens=self.new_tokens,
                eos_token_id=end_ids(self.umim.backbone) or None,
                merge=merge,
                seed=drawn,
                decode_max_damage=bound,
                **sampling,
            )
            rows += self.umim.engine.generate(batch, options).rows
        return rows

    def measure(self, decoding: str, merge: Merge, seeds: int) -> Report:
        """Measure one decoding with one way of merging."""
        runs = [
            generation_quality(
                self.generate(decoding, merge, seed),
                self.umim.backbone,
                self.references,
                self.features,
            )
            for seed in range(seeds if DECODINGS[decoding]["do_sample"] else 1)
        ]
        return {
            "decoding": decoding,
            "merge": merge,
            "runs": len(runs),
            "metrics": over_seeds(runs),
            "by_prompt": by_prompt(runs),
        }


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


def differences(own: Report, base: Report) -> dict[str, dict[str, float | None]]:
    """Return mean and paired standard error over prompts of a row less the base model's."""
    pairs = {name: (own["by_prompt"][name], base["by_prompt"][name]) for name in own["by_prompt"]}
    return {
        name: {
            "mean": float(np.mean(ours) - np.mean(theirs)),
            "std": mean_difference_error(ours, theirs),
        }
        for name, (ours, theirs) in pairs.items()
    }


def run(options: argparse.Namespace, report: Report) -> None:
    """Measure every checkpoint; every row is written at once."""
    if options.prompts >= FEWEST_TEXTS:
        mauve_library()  # before minutes of generating
    features = None if options.features is None else features_of(options.features)
    names = ("prompt_tokens", "new_tokens", "seeds", "max_damage")
    report |= {name: getattr(options, name) for name in names} | {"subjects": {}}
    models = {}
    for word in options.checkpoints:
        name, _, where = word.rpartition("=")  # NAME=WHERE, or WHERE, named by its last part
        models[name or Path(where).name] = UMIM.from_pretrained(
            where, backbone=options.backbone, dtype="float32"
        )
    if options.max_damage is not None:
        for umim in models.values():
            umim.rules.require_prices()
    if options.text is None:
        texts = held_out_docstrings()
    else:
        texts = options.text.read_text(encoding="utf-8").splitlines()
    for name, umim in models.items():
        own = features or TextFeatures(umim.backbone)
        subject = subject_of(umim, own, texts, options)
        rows: list[Report] = []
        report["subjects"][name] = {"features": own.label, "prompts": options.prompts, "rows": rows}
        for decoding in DECODINGS:
            base = len(rows)
            for merge in MERGES:
                rows.append(subject.measure(decoding, merge, options.seeds))
                if len(rows) > base + 1:
                    rows[-1]["differences"] = differences(rows[-1], rows[base])
                save(report, options.out)


def subject_of(
    umim: UMIM, features: TextFeatures, texts: Sequence[str], options: argparse.Namespace
) -> Subject:
    """Return a model with its prompts and what follows them."""
    length = options.prompt_tokens + options.new_tokens
    beginnings = choose_prompts(texts, umim, options.prompts, length)
    prompts, rest = zip(
        *(np.split(ids, [options.prompt_tokens]) for ids in beginnings), strict=True
    )
    references = [umim.backbone.decode(ids.tolist()) for ids in rest]
    bound = math.inf if options.max_damage is None else options.max_damage
    sizes = options.new_tokens, options.batch_size
    return Subject(umim, list(prompts), *sizes, bound, references, features)


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
