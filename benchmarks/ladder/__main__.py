"""Ladder from the paper's form to all steps together, at equal budgets on one backbone.

    python -m benchmarks.ladder --out docs/results/ladder-umim-docs-llama.json
    python -m benchmarks.ladder --backbone smollm2-135m-instruct --rules DIR --train train.npy
        --test general-test.npy --only paper last preserved

A row of the ladder (``ladder_rows``) is a form of the module, its loss, or what else is trained.
From every seed each row is trained from fresh weights for the same steps, over the same batches:
``steps`` times ``rows`` rows of the training text, each read once. All rows have the same rules,
hence the same token reduction; with ``--saving``, as many rules as save that share of layer-tokens.
They are measured on the same rows of the test text before the first step and after the last, in
float32.

A finished cell (one row, one seed) is written under ``--cells``; the same command finds it again,
so a run that was stopped goes on. A cell is found by backbone, rules, texts, form, loss, budget,
seed and versions, not by our own source: empty the folder to measure a change of the code.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.common import Benchmark, Report
from benchmarks.corpus import CACHE, EMBEDDED
from benchmarks.ladder.ladder_cells import LIBRARIES, Subject, cell
from benchmarks.ladder.ladder_rows import LadderRow, choose, ladder
from benchmarks.ladder.seed_spread import check_same_batches, difference, quality, spread
from benchmarks.row_texts import read_rows
from umim_core.backbone.backbone import Backbone, load_backbone
from umim_core.checkpoint.checkpoint_files import read_config
from umim_core.config.recipe import DistillConfig
from umim_core.config.recipe_files import validated
from umim_core.embedded.assets import embedded_names, embedded_path
from umim_core.errors import ConfigError
from umim_core.rules.protect import check_for_module
from umim_core.rules.ruleset import RuleSet

CELLS: Final = Path(".umim/benchmarks/ladder")
_FACTS: Final = (
    *("steps", "rows", "length", "seeds", "precision"),
    *("rate", "row_rate", "rule_rows", "saving"),
)
_STATES: Final = ("untrained", "trained")


def check_options(options: argparse.Namespace) -> None:
    """Refuse numbers that mean nothing, before anything is loaded.

    Raises:
        ConfigError: If one is out of bounds, or a seed is given twice.
    """
    for name, least in (("steps", 1), ("rows", 1), ("rule_rows", 1), ("test_rows", 2)):
        value = getattr(options, name)
        if value < least:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} must be at least {least}", value, "Leave it out.")
    if len(set(options.seeds)) != len(options.seeds) or min(options.seeds) < 0:
        raise ConfigError(
            "--seeds must be different and not negative", options.seeds, "Give 0 1 for two runs."
        )


def optimisation(options: argparse.Namespace) -> DistillConfig:
    """Return the optimisation of all rows: a fixed budget, validated at its ends alone.

    Raises:
        ConfigError: If a rate is out of bounds.
    """
    fields = {
        "max_steps": options.steps,
        "max_epochs": 1,
        "batch_size": options.rows,
        "learning_rate": options.rate,
        "row_rate": options.row_rate,
        "validate_every": options.steps,
        "validation_rows": options.rows,
        "checkpoint_every": options.steps,
        "bf16": options.precision == "bfloat16",
    }
    return validated(DistillConfig, fields, "the options of the ladder")


def shipped_rules(backbone: str) -> Path:
    """Return the rules of the checkpoint that ships for a backbone.

    Raises:
        ConfigError: If there is none.
    """
    for name in embedded_names("checkpoint"):
        found = embedded_path(name, "checkpoint")
        if found is not None and read_config(found).backbone == backbone:
            return found / "rules"
    raise ConfigError(
        "--rules must name a rule directory where no checkpoint ships for the backbone",
        backbone,
        "Mine them with umim mine.",
    )


def subject_of(options: argparse.Namespace, backbone: Backbone) -> Subject:
    """Read rules and texts.

    Raises:
        TokenizerMismatchError: If the rules belong to another tokenizer.
        RuleSetError: If there are no rules, or one holds a special token.
    """
    rules = RuleSet.load(options.rules or shipped_rules(options.backbone))
    check_for_module(
        rules, backbone.tokenizer_fingerprint, backbone.vocab_size, backbone.special_ids
    )
    read = partial(
        read_rows,
        tokenizer=backbone.require_tokenizer(),
        length=options.length,
        tokens=options.tokens,
        cache=options.cache,
    )
    test = read("test", options.test, rows=options.test_rows)
    train = read("train", options.train, rows=options.steps * options.rows, others=[test])
    return Subject(
        backbone, rules, options.saving, train, test, optimisation(options), options.batch_size
    )


def run(options: argparse.Namespace, report: Report) -> None:
    """Train and measure every row from every seed; each cell is written at once."""
    check_options(options)
    config = optimisation(options)
    rows = choose(ladder(options.rule_rows), options.only)
    backbone = load_backbone(options.backbone, local_files_only=True)
    subject = subject_of(options, backbone)
    report |= {
        "backbone": Path(options.backbone).name,
        "backbone_fingerprint": backbone.fingerprint,
        "rules": len(subject.rules),
        "rules_digest": subject.rules.digest,
        "texts": {"train": subject.train.facts(), "test": subject.test.facts()},
        **{name: getattr(options, name) for name in _FACTS},
        "warmup": config.warmup_fraction,
    }
    base = cell(options.cells, subject.base_key(), subject.measure_base)
    found = measure(subject, rows, options)
    check_same_batches({seed: cells["trained"] for seed, cells in found.items()})
    by_seed = [found[seed] for seed in options.seeds]
    report |= {
        "layers": backbone.num_layers,
        "ppl_base": base["ppl"],
        "ladder": {name: figures(name, rows, by_seed, base) for name in rows},
    }


def measure(
    subject: Subject, rows: Mapping[str, LadderRow], options: argparse.Namespace
) -> dict[int, dict[str, dict[str, Report]]]:
    """Return the cells by seed, state (untrained, trained) and row."""
    found: dict[int, dict[str, dict[str, Report]]] = {}
    for seed in options.seeds:
        found[seed] = {state: {} for state in _STATES}
        for name, row in rows.items():
            say = partial(_say, f"{name}, seed {seed}")
            keys = subject.untrained_key(row, seed), subject.trained_key(row, seed)
            makers = (
                partial(_untrained, subject, row, seed),
                partial(subject.train_and_measure, row, seed, say),
            )
            for state, key, make in zip(_STATES, keys, makers, strict=True):
                done = cell(options.cells, key, make)
                found[seed][state][name] = done
                say(f"{state}: KL {done['kl']:.3f}, Top-1 {done['top1']:.3f}")
    return found


def _untrained(subject: Subject, row: LadderRow, seed: int) -> Report:
    return subject.measure(subject.fresh(row, seed))


def _say(label: str, text: str) -> None:
    print(f"{label}: {text}", file=sys.stderr, flush=True)


def figures(
    name: str,
    rows: Mapping[str, LadderRow],
    cells: Sequence[Mapping[str, Mapping[str, Report]]],
    base: Report,
) -> Report:
    """Return the figures of one row."""
    row = rows[name]
    untrained, trained = ([found[state][name] for found in cells] for state in _STATES)
    report: Report = {
        "words": row.words,
        "form": row.form.form(),
        "kinds": dict(row.kinds),
        "token_reduction": trained[0]["token_reduction"],
        "untrained": quality(untrained, base),
        "trained": quality(trained, base),
        "seconds_per_step": spread([found["seconds_per_step"] for found in trained]),
        "skipped": sum(found["skipped"] for found in trained),
        "batches": [found["batches"] for found in trained],
    }
    if row.over is not None:
        others = [found["trained"][row.over] for found in cells]
        report |= {"over": row.over, "difference": difference(trained, others)}
    return report


_FILES: Final = {"nargs": "+", "default": [], "metavar": "[NAME=]FILE"}
main = Benchmark(
    name="ladder",
    doc=__doc__,
    options={
        "backbone": EMBEDDED,
        "rules": Path,
        "train": _FILES,
        "test": _FILES,
        "only": {"nargs": "+", "default": [], "metavar": "ROW"},
        "steps": 80,
        "rows": 4,
        "test_rows": 16,
        "length": 512,
        "seeds": [0, 1],
        "rate": 2e-3,
        "row_rate": 2.0,
        "rule_rows": 1000,
        "saving": {"type": float, "default": None},
        "precision": {"default": "bfloat16", "choices": ("float32", "bfloat16")},
        "tokens": 50_000_000,
        "batch_size": 4,
        "cells": CELLS,
        "cache": CACHE,
    },
    measure=run,
    libraries=LIBRARIES,
).main


if __name__ == "__main__":
    sys.exit(main())
