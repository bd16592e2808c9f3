"""Every stage of a run on a tiny model and a few docstrings, in the order of the flow.

The flow's own parts walk the recipe; nothing else of a run is there (no Prefect, MLflow or Ray), so
that a stage can be killed, starved or built two hundred times in a second or two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tasks.stages.mine
from flows import parts
from support.kills import die_at
from support.tiny_mining import InProcess, NoCluster
from support.tiny_models import random_model, tiny_config
from tasks.cluster.lease import ClusterLease
from tasks.report.comparison import Result
from tasks.run.pipeline import side_by_side, site_of
from tasks.run.stage import Artifact, Site, StageCall
from tasks.stages.publish import report_stage
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.config.recipe import ClusterConfig, Recipe, RunRecipe

VOCABULARY_OF = "umim-docs-llama"
_OPTIMISE = {"max_steps": 2, "batch_size": 2, "learning_rate": 0.002, "checkpoint_every": 1}
# Timings and the pages that show them are facts of one build.
NOT_EQUAL = ("benchmark", "report")


def save_backbone(folder: Path) -> Path:
    """Save a random Llama of 16 dimensions with the vocabulary of an embedded one."""
    tokenizer = load_tokenizer(VOCABULARY_OF)
    config = tiny_config(
        vocab_size=len(tokenizer), max_position_embeddings=512, initializer_range=0.02,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    random_model(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tiny_recipe(backbone: Path) -> Recipe:
    """Return a recipe that has every stage of a training and evaluation run."""
    step = {**_OPTIMISE, "validate_every": 1, "validation_rows": 8}
    return Recipe.model_validate(
        {
            "name": "tiny",
            "corpus": {
                "kind": "docstrings",
                "packages": ["networkx"],
                "out_of_domain": ["filelock"],
                "train_tokens": 20000,
            },
            "segment_length": 64,
            "cells": [{"backbone": str(backbone), "tau": 3, "adapt": True}],
            "distill": {**step, "bf16": False},
            "task": {"train": 6, "valid": 4, "test": 4},
            "adapt": {
                "rules": {"tau": 3, "overlap": "none", "containment": "keep"},
                "sft": {**step, "bf16": False},
                "dpo": step,
                "max_tokens": 128,
            },
            "evaluate": {
                "alignment_rows": 2, "perplexity_rows": 2, "task_questions": 3, "batch_size": 2,
            },
            "benchmark": {"prompt_lengths": [16], "new_tokens": 2, "warmup": 0, "pairs": 1},
            "cluster": {"workers": 0},
        }
    )  # fmt: skip


@contextmanager
def counting_in_process() -> Iterator[None]:
    """Count n-grams here and not on a cluster."""
    before, tasks.stages.mine.ClusterCounter = tasks.stages.mine.ClusterCounter, InProcess
    try:
        yield
    finally:
        tasks.stages.mine.ClusterCounter = before


@dataclass(frozen=True)
class Call:
    """A stage that was run: what was called, where, and its artifact."""

    call: StageCall
    site: Site
    artifact: Artifact

    @property
    def name(self) -> str:
        return self.artifact.stage

    def run(self, root: Path) -> Artifact:
        with counting_in_process():
            return self.call.build(replace(self.site, root=root))


@dataclass
class Walk:
    """A run of all stages, as the flow's parts start them."""

    root: Path
    recipe: RunRecipe
    lease: ClusterLease = field(default_factory=NoCluster)
    trained_on: ClusterLease | None = None  # where trainings ran, if elsewhere: it is in their keys
    calls: list[Call] = field(default_factory=list)
    results: Sequence[Result] = ()

    def __post_init__(self) -> None:
        self.lease.config = self.recipe.cluster

    def stage(self, call: StageCall, *, label: str = "", setting: str = "") -> Artifact:
        lease = self.trained_on if "workers" in call.stage.of_run else None
        site = site_of(self.root, self.recipe, lease or self.lease)
        artifact = call.build(site)
        self.calls.append(Call(call, site, artifact))
        return artifact

    def run_parallel(self, parts: Sequence[Callable[[], Any]], **_: bool) -> list[Any]:
        return [part() for part in parts]

    def register(self, backbone: str, trained: Artifact) -> None:
        pass

    @property
    def artifacts(self) -> list[Artifact]:
        return [call.artifact for call in self.calls]

    def report(self) -> Artifact:
        return self.stage(report_stage(recipe=self.recipe, results=list(self.results)))

    def executed(self) -> list[str]:
        return [call.name for call in self.calls if call.artifact.executed]


def walk(root: Path, recipe: Recipe) -> Walk:
    """Run a recipe below a root, all but the report; what is there is found."""
    run: Any = Walk(root, recipe)
    with counting_in_process():
        run.results = parts.run_everything(run)
    found: Walk = run
    return found


class _SideBySide(Walk):
    """A run of all stages, independent parts at the same time."""

    def run_parallel(self, parts: Sequence[Callable[[], Any]], **_: bool) -> list[Any]:
        return side_by_side(parts, max(1, len(parts)))


def walk_on_workers(root: Path, recipe: str, workers: int) -> Walk:
    """Run a recipe, given as JSON, whose trainings are finished; models run on so many workers.

    Its cluster, which is in the keys of trainings, is not used; without workers all runs here.
    """
    config = ClusterConfig(cpus=2, workers=workers, parallel_stages=2)
    run: Any = _SideBySide(root, Recipe.model_validate_json(recipe))
    with counting_in_process(), ClusterLease(config) as lease:
        run.lease, run.trained_on = lease, run.lease
        run.results = parts.run_everything(run)
    found: Walk = run
    return found


def walk_until(rank: int, root: Path, recipe: str, place: str, number: int, when: str) -> None:
    """Run a recipe, as JSON, in a child process that kills itself (:func:`die_at`)."""
    die_at(place, number, when)
    walk(root, Recipe.model_validate_json(recipe))


def stages_in(root: Path, names: Sequence[str]) -> dict[str, int]:
    """Return the time of writing of finished stages, by "stage/key"."""
    return {
        f"{path.parent.parent.name}/{path.parent.name}": path.stat().st_mtime_ns
        for name in names
        for path in root.glob(f"{name}/*/manifest.json")
        if path.parent.suffix != ".partial"
    }
