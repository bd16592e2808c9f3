"""Raw second halves behind shortened first halves: UMIM and baselines at matched token reduction.

    python -m benchmarks.second_half --test test.npy --cut valid.npy --damage train.npy
    python -m benchmarks.second_half --checkpoints paper=NAME best=DIR --methods truncation ehpc
        --target-tr 0.1 0.2 --raw-tails 0 16 --dtype bfloat16 --out docs/results/second_half.json

The first half of every window of ``--test`` is shortened, the second half stays raw, and its
perplexity is measured: the protocol that is fair to methods that delete tokens or columns, since
what is deleted cannot be a target. UMIM merges by the rules of least damage that save the target of
``--cut``, to within one rule; so do baselines that follow rules (other embeddings of the same
spans, span eviction). Token reducers and policies of the KV cache drop exactly as many tokens of
each first half as these rules save of it; beyond what all rules save, round(target * T) of its T
tokens. Every point has the realised reduction.

Every checkpoint is measured with every raw tail; baselines use the first one's backbone, and its
rules where they follow rules. Ratios of perplexities are paired by window, to the base model and to
the first checkpoint without raw tail at the same target. Without ``--methods`` all registered
baselines are measured but the full cache, which is the base model; one whose own model cannot be
loaded is listed as not run.

Rules that have prices (``umim prune --keep-all``) are taken by them; else their damage is measured
on the rows of ``--damage``, or given by ``--damage-table``. With ``--commit`` the same call goes on
behind the points that were finished, and further methods and targets join those in ``--out``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.common import Benchmark, Report, go_on, named, save
from benchmarks.corpus import EMBEDDED
from benchmarks.second_half.half_cells import (
    UMIM_ITSELF,
    ChooseRules,
    Subject,
    in_words,
    ratio_to,
    wanted_cells,
)
from benchmarks.token_reduction.row_texts import OPTIONS, RowText, read_texts
from benchmarks.token_reduction.rule_policies import check_held_out, check_tables, damage_table
from umim_core import UMIM
from umim_core.baselines.methods import BASELINES
from umim_core.config.form import check_raw_tail
from umim_core.rules.pruning import check_target, cut_to_budget, prices
from umim_core.store.artifacts import sha256_bytes

TARGETS: Final = (0.1, 0.2, 0.3, 0.4)
_SETTINGS: Final = (
    *("name", "texts", "window", "dtype", "batch_size"),
    *("backbone_fingerprint", "compared_with"),
)
_KEY: Final = ("method", "checkpoint", "target", "tail")
FULL: Final = "full-cache"  # the base model by another road


def run(options: argparse.Namespace, report: Report) -> None:
    """Measure every cell that is missing; each is written at once.

    Raises:
        ConfigError: If a method, a target or a raw tail is none.
        SystemExit: If the checkpoints have several backbones.
    """
    methods = options.methods or [name for name in BASELINES.names() if name != FULL]
    for name in methods:
        BASELINES.find(name)
    for target in options.target_tr:
        check_target(target)
    for tail in options.raw_tails:
        check_raw_tail(tail, "prompt")
    tables = named(options.damage_table)
    check_tables(tables, named(options.checkpoints))
    models = _opened(named(options.checkpoints), options.dtype)
    first = next(iter(models.values()))
    lengths = {"test": options.window, "cut": options.length}
    if any(umim.rules.prices is None and name not in tables for name, umim in models.items()):
        lengths["damage"] = options.length
    texts = read_texts(options, first.backbone.require_tokenizer(), lengths)
    report |= {
        "name": options.out.stem if options.out else "second_half",
        "texts": {use: texts[use].facts() for use in ("test", "cut")},
        "window": options.window,
        "dtype": options.dtype,
        "batch_size": options.batch_size,
        "backbone": first.backbone.name.rpartition("/")[2],
        "backbone_fingerprint": first.backbone.fingerprint,
        "compared_with": next(iter(models)),
        "subjects": {},
        "points": [],
    }
    go_on(report, options.out, _SETTINGS, ["base", "subjects", "points"])
    rows = texts["test"].rows
    subjects = {name: Subject(umim, rows, options.batch_size) for name, umim in models.items()}
    if "base" not in report:
        report["base"] = next(iter(subjects.values())).base()
    chosen: dict[str, ChooseRules] = {}
    for name, umim in models.items():
        chosen[name], facts = _rules(name, umim, texts, options)
        if report["subjects"].get(name, facts) != facts:
            stale = {name} if umim is not first else set(models)  # all are compared with the first
            report["points"] = [p for p in report["points"] if p["checkpoint"] not in stale]
        report["subjects"][name] = facts
    for cell in wanted_cells([*models], methods, options.target_tr, options.raw_tails):
        if any(cell == {name: point[name] for name in _KEY} for point in report["points"]):
            continue
        name = cell["checkpoint"]
        found = cell | subjects[name].measure(cell, chosen[name], report["base"])
        report["points"].append(found)
        for point in report["points"]:  # that of UMIM may come after those compared with it
            point.update(_against_umim(point, report["points"], report["compared_with"]))
        save(report, options.out)
        print(in_words(found), file=sys.stderr, flush=True)


def _opened(places: Mapping[str, str], dtype: str) -> dict[str, UMIM]:
    """Load checkpoints on one backbone."""
    models: dict[str, UMIM] = {}
    for name, where in places.items():
        if models:
            shared = next(iter(models.values())).backbone
            models[name] = UMIM.from_pretrained(where, backbone=shared, local_files_only=True)
        else:
            models[name] = UMIM.from_pretrained(where, dtype=dtype, local_files_only=True)
    return models


def _rules(
    name: str, umim: UMIM, texts: Mapping[str, RowText], options: argparse.Namespace
) -> tuple[ChooseRules, Report]:
    """Return what chooses a checkpoint's rules of least damage, and facts of the checkpoint."""
    price = umim.rules.prices
    if price is None:
        tables = named(options.damage_table)
        given = Path(tables[name]) if name in tables else None
        rows = texts["damage"].rows if given is None else []
        folder = options.cache / "token_reduction"
        table = damage_table(umim, rows, given, folder, options.batch_size, lambda tokens: None)
        check_held_out(name, table, texts["test"].rows)
        price = prices(table).astype(np.float32)
    facts = {
        "module_digest": umim.module.digest(),
        "rules_digest": umim.rules.digest,
        "prices_digest": sha256_bytes(price.tobytes()),
        "rules": len(umim.rules),
        "residual": umim.checkpoint.config.residual,
        "unit_positions": umim.compressed.unit_positions,
    }
    return lru_cache(partial(cut_to_budget, umim.rules, price, texts["cut"].segments())), facts


def _against_umim(found: Report, points: list[Report], first: str) -> Report:
    """Return the ratio to the perplexity of the first checkpoint at the same target, paired."""
    umim = {"method": UMIM_ITSELF, "checkpoint": first, "target": found["target"], "tail": 0}
    known = next((point for point in points if point | umim == point), None)
    if known is None or known is found or "row_sums" not in known or "row_sums" not in found:
        return {}
    return {"umim_ratio": ratio_to(known, found)}


main = Benchmark(
    name="second_half",
    doc=__doc__,
    options={
        "checkpoints": {"nargs": "+", "default": [EMBEDDED], "metavar": "[NAME=]PATH"},
        "methods": {"nargs": "+", "default": [], "metavar": "NAME"},
        "target_tr": list(TARGETS),
        "raw_tails": [0],
        "window": 1024,
        "dtype": {"default": "float32", "choices": ("float32", "bfloat16")},
        **OPTIONS,
    },
    measure=run,
).main


if __name__ == "__main__":
    sys.exit(main())
