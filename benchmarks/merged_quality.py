"""Quality lost to merging at a saving: merged text, and raw text behind merged prompts.

    python -m benchmarks.merged_quality --checkpoints NAME=DIR ... --test FILES --out FILE.json

Checkpoints share one backbone. Rows of the text are evenly spread over it.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.answering import RAW_TAIL
from benchmarks.runner import Benchmark, Report, device_name, tell
from benchmarks.subjects import Ids
from umim_core import UMIM
from umim_core.baselines.methods import TargetReduction
from umim_core.baselines.truncation import Truncation
from umim_core.errors import ConfigError, CorpusError, require
from umim_core.evaluation.alignment import evaluate_alignment
from umim_core.evaluation.perplexity import PerplexityResult, perplexity, second_half_perplexity
from umim_core.evaluation.rule_damage import text_digest
from umim_core.evaluation.scoring import RequestScorer, Scorer, method_scorer
from umim_core.text.sources import source_of
from umim_core.text.token_ids import segment_rows, spread_rows
from umim_core.text.tokens import first_ids

_READ: Final = 50_000_000  # tokens of the text, at most


def run(options: argparse.Namespace, report: Report) -> None:
    places = [word.rpartition("=") for word in options.checkpoints]
    names = [name or Path(place).name for name, _, place in places]
    rule = "every checkpoint must have a name of its own"
    require(len({*names}) == len(names), ConfigError, rule, ", ".join(names), "Say NAME=PATH.")
    models: dict[str, UMIM] = {}
    of_model = {key: getattr(options, key) for key in ("backbone", "dtype", "device")}
    for name, (*_, place) in zip(names, places, strict=True):
        models[name] = UMIM.from_pretrained(place, **of_model)
        of_model = {"backbone": models[name].backbone}
    backbone = models[names[0]].backbone
    ids = first_ids(source_of(options.test), backbone.require_tokenizer(), _READ)
    cut = segment_rows(ids, options.window)
    rule = f"the text must have {options.rows} rows of {options.window} tokens"
    require(len(cut) >= options.rows, CorpusError, rule, len(cut))
    rows = list(cut[spread_rows(len(cut), options.rows)].astype(np.int64))
    base = models[names[0]].merged_model.base()
    plain = perplexity(rows, base, options.batch_size)
    half = second_half_perplexity(rows, Scorer(base, options.window), options.batch_size)
    report["facts"]["device"] = device_name(backbone.device)
    report |= {
        "backbone": Path(backbone.name).stem,
        "backbone_fingerprint": backbone.fingerprint,
        "text": {"rows": len(rows), "digest": text_digest(rows)},
        "text_name": options.text_name,
        "window": options.window,
        "dtype": options.dtype,
        "raw_tail": RAW_TAIL,
        "ppl_base": plain.ppl,
        "ppl_half_base": half.ppl,
        "subjects": {},
    }
    for name, umim in models.items():
        report["subjects"][name] = _subject(umim, rows, plain, half, options.batch_size)
        tell(name, report["subjects"][name])


def _subject(
    umim: UMIM,
    rows: Sequence[Ids],
    plain: PerplexityResult,
    half: PerplexityResult,
    batch_size: int,
) -> Report:
    model, share, window = umim.merged_model, umim.merged_model.saved_share, len(rows[0])
    aligned = evaluate_alignment(rows, model, batch_size)
    read = perplexity(rows, model, batch_size)
    prompts = Scorer(model.reading("prompt", RAW_TAIL), window)
    behind = second_half_perplexity(rows, prompts, batch_size)
    saving = behind.token_reduction * share
    cut: RequestScorer = Scorer(model.base(), window)
    if saving:
        cut = method_scorer(Truncation(), model.base(), window, TargetReduction(saving))
    return {
        "form": umim.checkpoint.config.form(),
        "rules": len(umim.rules),
        "module_digest": umim.module.digest(),
        "token_reduction": read.token_reduction,
        "saving": read.token_reduction * share,
        "kl": aligned.state_means["kl"],
        "top1": aligned.state_means["top1"],
        "ppl_ratio": _ratio(read, plain),
        "prompt_token_reduction": behind.token_reduction,
        "prompt_saving": saving,
        "prompt_ppl_ratio": _ratio(behind, half),
        "truncation_ppl_ratio": _ratio(second_half_perplexity(rows, cut, batch_size), half),
    }


def _ratio(own: PerplexityResult, base: PerplexityResult) -> Report:
    """Return a ratio of perplexities and its standard error, paired by window."""
    nats, error = own.increase_over(base)
    ratio = math.exp(nats)
    return {"mean": ratio, "std": None if error is None else ratio * error}


BENCHMARK: Final = Benchmark(
    options={
        "checkpoints": {"nargs": "+", "required": True, "metavar": "[NAME=]PATH"},
        "test": {"nargs": "+", "required": True, "metavar": "FILE"},
        "text_name": "general English",
        "backbone": str,
        "rows": 32,
        "window": 512,
        "dtype": {"default": "float32", "choices": ("float32", "bfloat16")},
        "device": "cpu",
        "batch_size": 4,
    },
    measure=run,
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
