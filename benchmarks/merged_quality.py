"""Quality lost to merging at a saving: merged text, and raw text behind merged prompts.

    python -m benchmarks.merged_quality --checkpoints NAME=DIR ... --test FILES --out FILE.json

Checkpoints share one backbone.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from benchmarks.runner import Benchmark, Report, device_name, named, tell
from umim_core import UMIM
from umim_core.baselines.methods import TargetReduction
from umim_core.baselines.truncation import Truncation
from umim_core.errors import ConfigError, CorpusError, require
from umim_core.evaluation.alignment import evaluate_alignment
from umim_core.evaluation.perplexity import PerplexityResult, perplexity, second_half_perplexity
from umim_core.evaluation.rule_damage import text_digest
from umim_core.evaluation.scoring import Scorer, method_scorer
from umim_core.text.sources import source_of
from umim_core.text.token_ids import segment_rows, spread_rows
from umim_core.text.tokens import check_known, first_ids

_RAW_TAIL: Final = 16


def read_rows(
    options: argparse.Namespace, tokenizer: PreTrainedTokenizerBase
) -> tuple[str, list[NDArray[np.int64]]]:
    """Return the name of the test text, and rows that are evenly spread over it."""
    names, files = zip(*map(named, options.test), strict=True)
    rows = segment_rows(first_ids(source_of(files), tokenizer, options.tokens), options.window)
    rule = f"the text must have {options.rows} rows of {options.window} tokens"
    require(len(rows) >= options.rows, CorpusError, rule, len(rows))
    chosen = rows[spread_rows(len(rows), options.rows)]
    check_known(int(chosen.max()), tokenizer)
    return ", ".join(dict.fromkeys(names)), list(chosen.astype(np.int64))


def run(options: argparse.Namespace, report: Report) -> None:
    models: dict[str, UMIM] = {}
    load_options: dict[str, Any] = {
        name: getattr(options, name) for name in ("backbone", "dtype", "device")
    }
    for name, where in map(named, options.checkpoints):
        rule = "every checkpoint must have a name of its own"
        require(name not in models, ConfigError, rule, f"{name} twice", "Say NAME=PATH.")
        models[name] = UMIM.from_pretrained(where, budget=options.budget, **load_options)
        load_options = {"backbone": models[name].backbone}
    first = next(iter(models.values()))
    backbone = first.backbone
    report["facts"]["device"] = device_name(backbone.device)
    text, rows = read_rows(options, backbone.require_tokenizer())
    base = first.merged_model.base()
    report |= {
        "backbone": Path(backbone.name).stem,
        "backbone_fingerprint": backbone.fingerprint,
        "text": {
            "name": text,
            "rows": len(rows),
            "tokens": sum(map(len, rows)),
            "digest": text_digest(rows),
        },
        "text_name": options.text_name,
        "window": options.window,
        "dtype": options.dtype,
        "raw_tail": _RAW_TAIL,
        "subjects": {},
    }
    plain = perplexity(rows, base, options.batch_size)
    half = second_half_perplexity(rows, Scorer(base, options.window), options.batch_size)
    report |= {"ppl_base": plain.ppl, "ppl_half_base": half.ppl}
    for name, umim in models.items():
        report["subjects"][name] = _subject(umim, rows, plain, half, options.batch_size)
        tell(name, report["subjects"][name])


def _subject(
    umim: UMIM,
    rows: Sequence[np.ndarray],
    plain: PerplexityResult,
    half: PerplexityResult,
    batch_size: int,
) -> Report:
    model, share = umim.merged_model, umim.merged_model.saved_share
    aligned = evaluate_alignment(rows, model, batch_size)
    read = perplexity(rows, model, batch_size)
    prompts = model.reading("prompt", _RAW_TAIL)
    behind = second_half_perplexity(rows, Scorer(prompts, len(rows[0])), batch_size)
    saving, cut = behind.token_reduction * share, Scorer(model.base(), len(rows[0]))
    if saving:
        cut = method_scorer(Truncation(), model.base(), len(rows[0]), TargetReduction(saving))
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
        "test": {"nargs": "+", "required": True, "metavar": "[NAME=]FILE"},
        "text_name": "general English",
        "backbone": str,
        "budget": float,
        "rows": 32,
        "window": 512,
        "tokens": 50_000_000,
        "dtype": {"default": "float32", "choices": ("float32", "bfloat16")},
        "device": "cpu",
        "batch_size": 4,
    },
    measure=run,
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
