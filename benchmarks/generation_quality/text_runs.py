"""Runs of ``generation_quality``: prompts, and one decoding with one way of merging over seeds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from transformers import GenerationConfig

from benchmarks.common import Report
from benchmarks.generation_quality.method_runs import method_writer, write_batch
from umim_core import UMIM
from umim_core.baselines.methods import own_model
from umim_core.config.form import Merge
from umim_core.evaluation.generated_rows import RowWriter
from umim_core.evaluation.generation_quality import GenerationQuality, generation_quality
from umim_core.evaluation.paired_differences import mean_difference_error
from umim_core.evaluation.text_metrics.reference_similarity import References
from umim_core.inference.outputs import RowOutput
from umim_core.inference.request import Request
from umim_core.inference.stopping import end_ids
from umim_core.store.artifacts import finite_or_none
from umim_core.text.tokens import tokenize_documents

NEW_TOKENS: Final = 100
DECODINGS: Final[dict[str, dict[str, Any]]] = {
    "greedy": {"do_sample": False},
    "top-p 0.9, temperature 0.8": {"do_sample": True, "top_p": 0.9, "temperature": 0.8},
    "plain sampling": {"do_sample": True, "top_p": 1.0, "temperature": 1.0},
}
MERGES: Final[tuple[Merge, ...]] = ("none", "prompt", "all")  # rows of the report
_UNBOUNDED: Final[Report] = {
    "decode_max_damage": None,
    "span_eviction": None,
}
PLAIN: Final[Report] = {**_UNBOUNDED, "method": None, "method_model": None}
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Subject:
    """One model under measurement.

    Attributes:
        umim: Backbone, module and rules.
        prompts: Raw ids of the prompts [P_b] each.
        new_tokens: Most tokens to generate from each.
        references: What follows the prompts in the held-out text.
    """

    umim: UMIM
    prompts: list[Ids]
    new_tokens: int = NEW_TOKENS
    references: References | None = None


def choose_prompts(texts: Sequence[str], umim: UMIM, count: int, length: int) -> list[Ids]:
    """Return the beginnings of documents that are spread evenly over the corpus.

    Args:
        texts: Documents; those of fewer than ``length`` tokens are left out.
        umim: Whose tokenizer cuts them.
        count: Prompts wanted.
        length: Tokens of a beginning: of a prompt, and of what follows it where that is compared.

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
    bounds: Report | None = None,
    writer: RowWriter | None = None,
    **settings: Any,
) -> list[RowOutput]:
    """Generate from every prompt, in batches; the seed differs from batch to batch.

    Args:
        umim: The model.
        prompts: Raw ids of the prompts [P_b] each.
        merge: What is merged.
        batch_size: Prompts per batch.
        seed: Of the whole run.
        bounds: Bounds of merging and age of eviction, by their names in ``Request``.
        writer: Of a baseline, which writes in the model's place; nothing else is merged then.
        settings: transformers' settings.
    """
    config = GenerationConfig(**settings)
    rows: list[RowOutput] = []
    for first in range(0, len(prompts), batch_size):
        batch, drawn = prompts[first : first + batch_size], seed * len(prompts) + first
        if writer is not None:
            rows += write_batch(writer, batch, config, drawn)
            continue
        request = Request(merge=merge, seed=drawn, **(bounds or {}))
        rows += umim.engine.generate(batch, config, request).rows
    return rows


def run(
    subject: Subject,
    decoding: str,
    merge: Merge,
    seed: int,
    batch_size: int,
    row: Report = PLAIN,
    writer: RowWriter | None = None,
) -> list[RowOutput]:
    """Generate in one of the decodings; an end-of-sequence token ends a text.

    Without a bound on damage in the row all rules merge, whatever the checkpoint's own bound is.
    A baseline writes by its ``writer``.
    """
    bounds = {name: row[name] for name in _UNBOUNDED}
    if bounds["decode_max_damage"] is None:
        bounds["decode_max_damage"] = math.inf
    settings = {
        "max_new_tokens": subject.new_tokens,
        "eos_token_id": end_ids(subject.umim.backbone) or None,
        **DECODINGS[decoding],
    }
    given = (subject.umim, subject.prompts, merge, batch_size, seed, bounds, writer)
    return generate(*given, **settings)


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


def by_prompt(runs: Sequence[GenerationQuality]) -> dict[str, dict[str, list[float]]]:
    """Return the similarity to its reference of every prompt's text, the mean over seeds.

    Returns:
        Under ``by_prompt``, values per prompt by figure; nothing if nothing was compared.
    """
    found = [run.similarity.by_text for run in runs if run.similarity is not None]
    if not found:
        return {}
    means = {name: np.mean([values[name] for values in found], axis=0) for name in found[0]}
    return {"by_prompt": {name: np.round(mean, 6).tolist() for name, mean in means.items()}}


def differences(row: Report, rows: Sequence[Report]) -> dict[str, dict[str, float | None]]:
    """Return the differences in similarity to the base model's texts of the same decoding.

    Args:
        row: Row of the report.
        rows: Those before it.

    Returns:
        Mean over prompts and its paired standard error, by figure; empty for the base model's own
        row and where nothing was compared.
    """
    own = {"decoding": row["decoding"], "merge": "none"} | PLAIN
    known = (PLAIN | other for other in rows if other is not row)
    base = next((other for other in known if other | own == other), None)
    if base is None or "by_prompt" not in row:
        return {}
    pairs = {name: (row["by_prompt"][name], base["by_prompt"][name]) for name in row["by_prompt"]}
    return {
        name: {
            "mean": float(np.mean(ours) - np.mean(theirs)),
            "error": mean_difference_error(ours, theirs),
        }
        for name, (ours, theirs) in pairs.items()
    }


def new_rows(
    done: Sequence[Report],
    damages: Sequence[float],
    ages: Sequence[int],
    methods: Sequence[str] = (),
) -> Iterator[Report]:
    """Yield decoding, merging, bounds, age and baseline of every row that is not done."""
    ways: list[Report] = [
        *({"merge": merge} for merge in MERGES),
        *({"merge": "all", "decode_max_damage": most} for most in damages),
        *({"merge": "none", "span_eviction": age} for age in ages),
        *(
            {"merge": "none", "method": method, "method_model": own_model(method)}
            for method in methods
        ),
    ]
    known = [PLAIN | old for old in done]
    for decoding in DECODINGS:
        for way in ways:
            row = {"decoding": decoding} | PLAIN | way
            if not any(old | row == old for old in known):
                yield row


def measure(subject: Subject, row: Report, seeds: int, batch_size: int) -> Report:
    """Measure one decoding with one way of merging, or under one baseline."""
    longest = max(map(len, subject.prompts)) + subject.new_tokens
    method = row["method"]
    writer = None if method is None else method_writer(subject.umim, method, longest)
    runs = [
        generation_quality(
            run(subject, row["decoding"], row["merge"], seed, batch_size, row, writer),
            subject.umim.backbone,
            references=subject.references,
        )
        for seed in range(seeds if DECODINGS[row["decoding"]]["do_sample"] else 1)
    ]
    return row | {"runs": len(runs), "metrics": over_seeds(runs)} | by_prompt(runs)
