"""Cost of compressing by token reducers against the prefill that it saves: a table, then JSON.

    python -m benchmarks.reducers --out docs/results/reducers.json
    python -m benchmarks.reducers --checkpoint umim-docs-llama --lengths 128 --rounds 3

In one run and on the same text: the base model's prefill of all tokens, the choice of every
reducer at the token reduction asked for, the prefill of what is left, and UMIM at its own rules. A
method pays where compressing and what is left take less time than the whole. The text is that of
``benchmarks.engine_smollm2``. ``--out`` is written after each length and token reduction; with
``--commit`` the same command goes on behind those that it holds. Kept tokens must be the same in
all repetitions.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

import torch

from benchmarks.common import Benchmark, Report, go_on, save
from benchmarks.engine_smollm2 import CHECKPOINT, general_text, text_digest
from benchmarks.reducers.reducer_costs import make_reducers, measure
from benchmarks.timing import device_name
from umim_core.baselines.reduction import TargetReduction
from umim_core.model.umim import UMIM

METHODS: Final = [
    "truncation",
    "selective-context",
    "llmlingua",
    "llmlingua2",
    "sentence-cosine",
    "ehpc",
]


def run(options: argparse.Namespace, report: Report) -> None:
    """Measure every length and token reduction, all methods in turn.

    Raises:
        ConfigError: If a token reduction or a method is none.
    """
    for target in options.target_tr:
        TargetReduction(target)
    umim = UMIM.from_pretrained(options.checkpoint, dtype=options.dtype, device=options.device)
    text, ids = general_text(umim, max(options.lengths))
    reducers, missing = make_reducers(options.methods, umim.compressed)
    report |= {
        "subject": {
            "backbone": Path(umim.backbone.name).name,
            "fingerprint": umim.backbone.fingerprint,
            "rules": len(umim.rules),
            "text": text,
            "text_digest": text_digest(),
        },
        "device": device_name(umim.backbone.device),
        "dtype": options.dtype,
        "rounds": options.rounds,
        "methods": list(reducers),
        "not_run": missing,
        "cases": {},
    }
    settings = ("subject", "device", "dtype", "rounds", "methods")
    go_on(report, options.out, settings, ("cases",))
    for length in options.lengths:
        for target in options.target_tr:
            name = f"{length} tokens, TR {target}"
            if name not in report["cases"]:
                found = measure(umim.compressed, reducers, ids[:length], target, options.rounds)
                report["cases"][name] = found | {"target": target}
            report["equal"] = equal(report)
            save(report, options.out)


def equal(report: Report) -> bool:
    """Return whether every method kept the same tokens in all repetitions."""
    return all(
        row["equal"] for case in report["cases"].values() for row in case["methods"].values()
    )


main = Benchmark(
    name="reducers",
    doc=__doc__,
    options={
        "checkpoint": CHECKPOINT,
        "methods": METHODS,
        "lengths": [512, 1024, 2048, 4096],
        "target_tr": [0.14],
        "rounds": 5,
        "dtype": "float32",
        "device": "cuda" if torch.cuda.is_available() else "cpu",
    },
    measure=run,
).main


if __name__ == "__main__":
    sys.exit(main())
