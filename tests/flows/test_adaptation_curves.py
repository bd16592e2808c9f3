"""Curves of a task's adaptation on a tiny model: every point, its pairing, resuming, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flows.parts import measure_adaptation, plan
from support.tiny_pipeline import Walk
from support.tiny_table import QUESTIONS, write_questions
from tasks.cluster.lease import ClusterLease
from tasks.run.checks import check_recipe
from tasks.run.recipes import find_recipe, recipe_names
from tasks.stages.adaptation import read_scores
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.config.adaptation_recipe import AdaptationRecipe
from umim_core.config.model_base import validated
from umim_core.errors import ConfigError
from umim_core.store.artifacts import read_json

_STEP = {"max_steps": 2, "batch_size": 2, "learning_rate": 0.01, "validate_every": 1}
_STEP |= {"validation_rows": 4, "checkpoint_every": 1}


def fields(checkpoint: Path, data: Path, **changes: Any) -> dict[str, Any]:
    files = {split: str(data / f"{split}.jsonl") for split in ("train", "valid", "test")}
    return {
        "name": "tiny",
        "kind": "adaptation",
        "figure": "fig:arc_compar",
        "questions": {"kind": "files", **files},
        "sizes": {"train": 6, "valid": 4, "test": QUESTIONS},
        "checkpoints": [str(checkpoint)],
        "controls": ["input-adapter"],
        "taus": [2, 1],
        "seeds": [0, 1],
        "max_tokens": 60,
        "sft": {**_STEP, "bf16": False},
        "dpo": _STEP,
        "batch_size": 4,
        "cluster": {"workers": 0},
        **changes,
    }


@pytest.fixture(scope="module")
def curves(
    tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Walk, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("curves")
    given = fields(tiny_checkpoint, write_questions(folder / "questions"))
    recipe = AdaptationRecipe.model_validate(given)
    with ClusterLease(recipe.cluster) as lease:
        run: Any = Walk(folder / "root", recipe, lease)
        body: Any = read_json(measure_adaptation(run).path / "adaptation.json")
    return run, body


def test_every_setting_threshold_seed_and_control_is_a_point_as_planned(curves: Any) -> None:
    run, body = curves
    assert sorted(step["stage"] for step in plan(run.recipe)) == sorted(run.executed())
    (backbone,) = body["backbones"]
    found = [(p["setting"], p["tau"], p["seed"]) for p in backbone["points"]]
    trained = ["WT + FT", "WT + DPO", "Task-trained", "Task-Adapted"]
    wanted = [("WT", None, None), ("WT + Rules", 2, None), ("WT + Rules", 1, None)]
    wanted += [(name, tau, seed) for tau in (2, 1) for seed in (0, 1) for name in trained]
    wanted += [("input-adapter", None, seed) for seed in (0, 1)]
    assert sorted(map(str, found)) == sorted(map(str, wanted))
    assert body["questions"]["test"] == QUESTIONS


def test_scores_of_the_base_model_are_of_its_weights_and_tokenizer(
    curves: Any, tiny_checkpoint: Path
) -> None:
    run, _ = curves
    base, *others = (a.manifest()["inputs"] for a in run.artifacts if a.stage == "choice-scores")
    config = Checkpoint.load(tiny_checkpoint).config
    assert base["model.model"] == config.backbone_fingerprint
    assert base["model.tokenizer"] == config.tokenizer_fingerprint
    read = {"questions.test", "model.model", "base"}
    assert others and all(set(inputs) == read for inputs in others)


def test_points_are_paired_with_the_base_and_trained_ones_with_rules_alone_and_controls(
    curves: Any,
) -> None:
    run, body = curves
    hits = {
        tuple(artifact.manifest()["config"]["model"][name] for name in ("setting", "tau", "seed")):
        read_scores(artifact).values["acc_tok"]
        for artifact in run.artifacts
        if artifact.stage == "choice-scores"
    }  # fmt: skip
    base = next(own for (setting, *_), own in hits.items() if setting == "base")
    for point in body["backbones"][0]["points"]:
        setting, tau, seed = point["setting"], point["tau"], point["seed"]
        gains = np.subtract(hits[setting, tau, seed], base)
        assert point["difference"] == pytest.approx(gains.mean())
        assert point["gained"] - point["lost"] == gains.sum()
        if seed is None or point["kind"] == "control":
            assert "against" not in point
            continue
        others = {
            "WT": hits["WT", None, None],
            "WT + Rules": hits["WT + Rules", tau, None],
            "input-adapter": hits["input-adapter", None, seed],
        }
        assert point["against"].keys() == others.keys()
        for name, other in others.items():
            gains = np.subtract(hits[setting, tau, seed], other)
            found = point["against"][name]
            assert found["difference"] == pytest.approx(gains.mean())
            assert found["difference_se"] == pytest.approx(gains.std(ddof=1) / len(gains) ** 0.5)


@pytest.mark.parametrize("name", [n for n in recipe_names("adaptation/") if "8b" not in n])
def test_a_recipe_plans_a_training_per_setting_threshold_and_seed(name: str) -> None:
    recipe = find_recipe(name)
    file = getattr(recipe.questions, "train", None)
    if file is not None and not Path(file).is_file():
        pytest.skip(f"the questions are not at {file}")
    assert isinstance(recipe, AdaptationRecipe) and name == f"adaptation/{recipe.name}"
    steps = plan(recipe)
    assert len({(step["stage"], step["of"]) for step in steps}) == len(steps)
    stages = [step["stage"] for step in steps]
    runs = len(recipe.checkpoints) * len(recipe.taus) * len(recipe.seeds)
    by = {"sft": ("WT + FT", "Task-trained"), "dpo": ("WT + DPO", "Task-Adapted")}
    for stage, names in by.items():
        assert stages.count(stage) == runs * len([s for s in recipe.settings if s in names])
    controls = len(recipe.checkpoints) * len(recipe.controls) * len(recipe.seeds)
    assert stages.count("control") == controls and stages[-1] == "adaptation"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_tokens": 5000}, "max_tokens must be at most"),
        ({"questions": {"prompt": "no field"}}, "the prompt must hold the field"),
        ({"questions": {"valid": "absent.jsonl"}}, "questions.valid must be a file"),
        ({"questions": {"train": "."}}, "questions.train must be a file"),
    ],
)
def test_what_must_fail_is_refused_before_anything_runs(
    change: dict[str, Any], message: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    usual = fields(tiny_checkpoint, write_questions(tmp_path))
    body = usual | change | {"questions": usual["questions"] | change.get("questions", {})}
    with pytest.raises(ConfigError, match=message):
        check_recipe(validated(AdaptationRecipe, body, "tiny.yaml"), "umim-adapt", planned=True)
