"""Texts of the base model against texts of UMIM: repetition, diversity, perplexity, cache.

    python -m benchmarks.generation_quality --out docs/results/generation_quality.json
    python -m benchmarks.generation_quality --checkpoint DIR --name NAME --text test.txt

Prompts are the first 100 tokens of held-out documents: docstrings for the embedded checkpoints, the
lines of a text file for a named one. Up to 100 tokens follow; an end-of-sequence token ends a text.
Every decoding runs without merging (the base model), with merged prompts, with merged prompts and
generated tokens, and with the latter where tokens were likely (``decode_min_probability``).
Sampling is repeated with several seeds. Greedy decoding draws nothing, so it is one run. The
perplexity is that of the generated tokens under the base model, given the prompt. With ``--commit``
the same call goes on behind the rows that were finished.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from transformers import GenerationConfig

from benchmarks.common import Benchmark, Report, go_on, save
from benchmarks.corpus import CACHE, held_out_texts
from umim_core import UMIM
from umim_core.config.form import Merge
from umim_core.embedded.assets import embedded_names
from umim_core.evaluation.generation_quality import GenerationQuality, generation_quality
from umim_core.inference.outputs import RowOutput
from umim_core.inference.request import Request
from umim_core.inference.stopping import end_ids
from umim_core.store.artifacts import digest_of, finite_or_none
from umim_core.text.tokens import tokenize_documents

PROMPT_TOKENS: Final = 100
NEW_TOKENS: Final = 100
DECODINGS: Final[dict[str, dict[str, Any]]] = {
    "greedy": {"do_sample": False},
    "top-p 0.9, temperature 0.8": {"do_sample": True, "top_p": 0.9, "temperature": 0.8},
    "plain sampling": {"do_sample": True, "top_p": 1.0, "temperature": 1.0},
}
MERGES: Final[tuple[Merge, ...]] = ("none", "prompt", "all")  # rows of the report
BOUNDS: Final = (0.3, 0.6, 0.9)  # further rows
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Subject:
    """One model under measurement.

    Attributes:
        umim: Backbone, module and rules.
        prompts: Raw ids of the prompts [P_b] each.
        new_tokens: Most tokens to generate from each.
    """

    umim: UMIM
    prompts: list[Ids]
    new_tokens: int = NEW_TOKENS


def choose_prompts(texts: Sequence[str], umim: UMIM, count: int, length: int) -> list[Ids]:
    """Return the beginnings of documents that are spread evenly over the corpus.

    Args:
        texts: Documents; those of fewer than ``length`` tokens are left out.
        umim: Whose tokenizer cuts them.
        count: Prompts wanted.
        length: Tokens of a prompt.

    Raises:
        SystemExit: If fewer documents are long enough.
    """
    tokenizer = umim.backbone.require_tokenizer()
    long = [ids for ids in tokenize_documents(texts, tokenizer) if len(ids) >= length]
    if len(long) < count:
        raise SystemExit(f"only {len(long)} documents have {length} tokens, {count} are wanted")
    chosen = np.linspace(0, len(long) - 1, count).astype(np.int64)
    return [long[index][:length].astype(np.int64) for index in chosen]


def generate(
    umim: UMIM,
    prompts: Sequence[Ids],
    merge: Merge,
    batch_size: int,
    seed: int = 0,
    min_probability: float = 0.0,
    **settings: Any,
) -> list[RowOutput]:
    """Generate from every prompt, in batches; the seed differs from batch to batch."""
    config = GenerationConfig(**settings)
    rows: list[RowOutput] = []
    for first in range(0, len(prompts), batch_size):
        request = Request(
            merge=merge,
            seed=seed * len(prompts) + first,
            decode_min_probability=min_probability,
        )
        rows += umim.engine.generate(prompts[first : first + batch_size], config, request).rows
    return rows


def run(
    subject: Subject,
    decoding: str,
    merge: Merge,
    seed: int,
    batch_size: int,
    min_probability: float = 0.0,
) -> list[RowOutput]:
    """Generate in one of the decodings; an end-of-sequence token ends a text."""
    settings = {
        "max_new_tokens": subject.new_tokens,
        "eos_token_id": end_ids(subject.umim.backbone) or None,
        **DECODINGS[decoding],
    }
    return generate(
        subject.umim, subject.prompts, merge, batch_size, seed, min_probability, **settings
    )


def over_seeds(runs: Sequence[GenerationQuality]) -> dict[str, dict[str, float | None]]:
    """Return mean and sample standard deviation of every figure; no deviation of one run."""
    metrics = [found.metrics() for found in runs]
    summary = {}
    for name in metrics[0]:
        values = [found[name] for found in metrics]
        deviation = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
        summary[name] = {
            "mean": finite_or_none(float(np.mean(values))),
            "std": finite_or_none(deviation),
        }
    return summary


def new_rows(done: Sequence[Report], bounds: Sequence[float]) -> Iterator[Report]:
    """Yield decoding, merging and bound of every row that is not done."""
    merges = [*((merge, 0.0) for merge in MERGES), *(("all", bound) for bound in bounds)]
    for decoding in DECODINGS:
        for merge, bound in merges:
            row = {"decoding": decoding, "merge": merge, "decode_min_probability": bound}
            if not any(old | row == old for old in done):
                yield row


def measure(subject: Subject, row: Report, seeds: int, batch_size: int) -> Report:
    """Measure one decoding with one way of merging."""
    bound = row["decode_min_probability"]
    runs = [
        generation_quality(
            run(subject, row["decoding"], row["merge"], seed, batch_size, bound),
            subject.umim.backbone,
        )
        for seed in range(seeds if DECODINGS[row["decoding"]]["do_sample"] else 1)
    ]
    return row | {"runs": len(runs), "metrics": over_seeds(runs)}


def run_all(options: argparse.Namespace, report: Report) -> None:
    """Measure the embedded checkpoints, then the named one; every row is written at once."""
    if (options.checkpoint is None) != (options.text is None):
        raise SystemExit("--checkpoint and --text go together")
    names = ("prompt_tokens", "new_tokens", "seeds", "batch_size", "min_probability")
    report |= {name: getattr(options, name) for name in names} | {"subjects": {}}
    go_on(report, options.out, names, ["subjects"])

    def add(name: str, umim: UMIM, texts: Sequence[str]) -> None:
        prompts = choose_prompts(texts, umim, options.prompts, options.prompt_tokens)
        subject = Subject(umim, prompts, options.new_tokens)
        found = {
            "prompts": len(prompts),
            "prompts_digest": digest_of({"ids": [prompt.tolist() for prompt in prompts]}),
            "backbone_fingerprint": umim.backbone.fingerprint,
            "module_digest": umim.module.digest(),
            "rules_digest": umim.rules.digest,
        }
        earlier = report["subjects"].get(name, {})
        rows = earlier["rows"] if earlier | found == earlier else []
        report["subjects"][name] = found | {"rows": rows}
        for row in new_rows(list(rows), options.min_probability):
            rows.append(measure(subject, row, options.seeds, options.batch_size))
            save(report, options.out)

    docstrings = held_out_texts(options.cache) if options.embedded else []
    for name in options.embedded:
        add(name, UMIM.from_pretrained(name), docstrings)
    if options.checkpoint is not None:
        umim = UMIM.from_pretrained(options.checkpoint, backbone=options.backbone)
        lines = options.text.read_text(encoding="utf-8").splitlines()
        add(options.name or Path(options.checkpoint).resolve().name, umim, lines)


main = Benchmark(
    name="generation_quality",
    doc=__doc__,
    options={
        "embedded": {"nargs": "*", "default": embedded_names()},
        "checkpoint": str,
        "backbone": str,
        "text": Path,
        "name": str,
        "prompts": 64,
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": NEW_TOKENS,
        "seeds": 5,
        "min_probability": {"nargs": "*", "type": float, "default": list(BOUNDS)},
        "batch_size": 32,
        "cache": CACHE,
    },
    measure=run_all,
).main


if __name__ == "__main__":
    sys.exit(main())
