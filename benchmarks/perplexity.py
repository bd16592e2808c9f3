"""Token-level perplexity in one forward against base and listing: a table, then one JSON line.

    python -m benchmarks.perplexity --out docs/results/perplexity.json
    python -m benchmarks.perplexity --backbones umim-docs-llama --length 128 --rows 2 --pairs 3
    python -m benchmarks.perplexity --backbones umim-smollm2-135m --rows 4 --pairs 5

A checkpoint other than the small ones reads general English text (test split of
``../shared/data/general``; docstrings where that is absent).

Sides: the base model's scores of the same rows; ours under rules of which none lies inside another,
and under rules that do; and, for both, a listing as the paper prints it. Listing and ours are
compared token by token. Gates: P5 of docs/performance.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.runner import Benchmark, Gates, Report, alternate, ratio, spread
from benchmarks.subjects import BACKBONES, Subject, mined_rules, subject
from umim_core.backbone.devices import default_device
from umim_core.config.rule_options import AS_FOUND, RuleOptions
from umim_core.errors import CorpusError, require
from umim_core.merging.likelihood import token_log_probs
from umim_core.merging.packing import pack_rows
from umim_core.rules.matcher import Matcher

BASE: Final = "base model"
LISTING: Final = "listing"
LIMITS: Final = {"plain": 1.3, "nested": 1.5}  # times a base forward
LISTING_TIMES: Final = 20.0
LISTING_FROM: Final = 512  # tokens of a row that the gate is set for
TOLERANCE: Final = 2e-3  # nats per token, float32
_MINED: Final = 60_000
_TAU: Final = 5
Rows = list[NDArray[np.int64]]


def measure(subject: Subject, rules: Mapping[str, Matcher], rows: Rows, rounds: int) -> Report:
    def ours(rows: Rows, matcher: Matcher | None) -> list[torch.Tensor]:
        return token_log_probs(rows, replace(subject.merged_model, matcher=matcher))

    sides: dict[str, Callable[[], object]] = {BASE: partial(ours, rows, None)}
    sides |= {name: partial(ours, rows, matcher) for name, matcher in rules.items()}
    together = alternate(sides, rounds)
    figures: Report = {BASE: {"seconds": spread(together[BASE])}}
    for name, matcher in rules.items():
        one, listed = partial(ours, rows[:1], matcher), partial(listing, subject, matcher, rows[0])
        listings = alternate({name: one, LISTING: listed}, rounds)
        units = sum(len(matcher.segment(row)[0]) for row in rows)
        figures[name] = {
            "rules": len(matcher.rules),
            "infix_free": matcher.rules.infix_free,
            "token_reduction": 1 - units / sum(map(len, rows)),
            "seconds": spread(together[name]),
            "times_base": ratio(together, name, BASE),
            "listing_seconds": spread(listings[LISTING]),
            "listing_times": ratio(listings, LISTING, name),
            "difference": float((one()[0] - listed()).abs().max()),
        }
    return figures


@torch.no_grad()
def listing(subject: Subject, matcher: Matcher, row: NDArray[np.int64]) -> torch.Tensor:
    """Score a row [T] with one forward over its units and one for every hidden token [T - 1]."""
    backbone = subject.backbone
    scores = torch.zeros(len(row) - 1, dtype=torch.float64)

    def hidden(ids: NDArray[np.int64]) -> tuple[torch.Tensor, NDArray[np.int64]]:
        starts, lengths = matcher.segment(ids)
        packed = pack_rows([ids], [(starts, lengths)], device=backbone.device)
        positions = packed.position_ids(subject.merged_model.unit_positions)
        embeddings = subject.merged_model.embed(packed)
        return backbone.hidden(embeddings, None, positions)[0], starts + lengths - 1

    def score(states: torch.Tensor, at: NDArray[np.int64]) -> None:
        log_probs = backbone.head(states).float().log_softmax(-1)
        targets = torch.from_numpy(row[at + 1]).to(backbone.device)
        scores[at] = log_probs.gather(1, targets[:, None])[:, 0].double().cpu()

    states, ends = hidden(row[:-1])
    score(states, ends)
    for place in np.setdiff1d(np.arange(len(row) - 1), ends):
        states, _ = hidden(row[: place + 1])
        score(states[-1:], np.array([place]))
    return scores


def gates(report: Report) -> Gates:
    gates = Gates()
    for backbone, measured in report["backbones"].items():
        for name, limit in LIMITS.items():
            times = measured[name]["times_base"]["median"]
            gates.at_most(f"{backbone}_{name}_times_base", times, limit)
            if report["length"] >= LISTING_FROM:
                times = measured[name]["listing_times"]["median"]
                gates.at_least(f"{backbone}_{name}_listing_times", times, LISTING_TIMES)
    return gates


def run(options: argparse.Namespace, report: Report) -> None:
    report |= {"device": options.device, "length": options.length, "rows": options.rows}
    report["backbones"] = {}
    timed = options.rows * options.length
    for name in options.backbones:
        backbone_subject = subject(name, timed + _MINED, dtype="float32", device=options.device)
        report |= {"text": backbone_subject.text} if backbone_subject.text else {}
        rule, size = f"{options.rows} rows of {options.length} tokens", len(backbone_subject.ids)
        require(size >= timed, CorpusError, f"the text must have {rule}", f"{size} tokens")
        rows = list(backbone_subject.ids[:timed].reshape(options.rows, options.length))
        mined = backbone_subject.ids[timed:]
        nested = mined_rules(mined, np.array([0, len(mined)]), RuleOptions(tau=_TAU, **AS_FOUND))
        plain = backbone_subject.merged_model.require_matcher()
        rules = {"plain": plain, "nested": Matcher(nested)}
        report["backbones"][Path(name).name] = measure(backbone_subject, rules, rows, options.pairs)
    report["equal"] = all(
        measured[name]["difference"] <= TOLERANCE
        for measured in report["backbones"].values()
        for name in LIMITS
    )


BENCHMARK: Final = Benchmark(
    options={
        "backbones": list(BACKBONES),
        "length": 512,
        "rows": 8,
        "pairs": 10,
        "device": default_device(),
    },
    measure=run,
    gates=gates,
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
