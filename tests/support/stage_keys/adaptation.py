"""Calls of the stages of a task's adaptation curves, and what their keys must not hold."""

from __future__ import annotations

import json
from pathlib import Path

from support.stage_keys.inputs import BY_START, CLUSTER, NO_MATTER_HOW, TRAIN, Inputs
from support.stage_keys.variations import StageCall
from tasks.stages.adaptation import (
    Curve,
    ScoredModel,
    ScoredPoint,
    adaptation_stage,
    choice_scores_stage,
    choices_stage,
    control_stage,
    start_stage,
)
from umim_core.config.adaptation_recipe import AdaptationRecipe

_ELSEWHERE = "of another stage"


def write_questions(folder: Path) -> dict[str, str]:
    """Write a file of questions per split, and another one next to each."""
    found = {}
    for number, split in enumerate(("train", "valid", "test")):
        for name in ("", "-another"):
            rows = [
                {
                    "id": f"{n}",
                    "context": split + name + str(n),
                    "choices": ["a", "b"],
                    "gold": n % 2,
                }
                for n in range(9 + number)
            ]
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / f"{split}-questions.jsonl{name}").write_text(text, encoding="utf-8")
        found[split] = str(folder / f"{split}-questions.jsonl")
    return found


def adaptation_calls(inputs: Inputs) -> dict[str, StageCall]:
    """Return a call of every stage of adaptation curves."""
    recipe = AdaptationRecipe.model_validate(
        {
            "name": "t", "kind": "adaptation", "figure": "fig:arc_compar",
            "questions": {"kind": "files", **write_questions(inputs.text.parent)},
            "sizes": {"train": 4, "valid": 4, "test": 4}, "checkpoints": ["umim-docs-llama"],
            "controls": ["lora"], "taus": [5], "sft": TRAIN, "dpo": TRAIN,
            "control_dpo": {"lora": TRAIN},
            "cluster": {"workers": 2},
        }
    )  # fmt: skip
    make = inputs.artifacts.make
    asked = make("choices", "train.jsonl", "valid.jsonl", "test.jsonl", task="another")
    start = make("start", "checkpoint")

    def free(*used: str) -> dict[str, str]:
        names = [name for name in AdaptationRecipe.model_fields if name not in (*used, "kind")]
        return {f"recipe.{name}": _ELSEWHERE for name in names}

    cluster = {f"recipe.cluster.{name}": NO_MATTER_HOW for name in CLUSTER}
    lease = {"lease": "the recipe's cluster is in the key"}
    model = ScoredModel("WT + FT", start, tau=5, seed=1)
    scores = make("choice-scores", "scores.json")
    point = ScoredPoint(model, scores, make("task-rules", "rules"))
    return {
        "choices": StageCall(
            choices_stage, {"recipe": recipe}, free("questions", "part", "sizes")
        ),
        "start": StageCall(start_stage, {"checkpoint": inputs.checkpoint}, {}),
        "control": StageCall(
            control_stage,
            {"lease": inputs.lease, "recipe": recipe, "cell": inputs.cell, "task": asked,
             "control": "lora"},
            {**lease, **cluster,
             **free("seed", "cluster", "max_tokens", "control_dpo"),
             "task/test.jsonl": "is not trained on",
             **{f"cell.{name}": "of merge modules" for name in type(inputs.cell).model_fields
                if name not in ("backbone", "revision")}},
        ),
        "choice-scores": StageCall(
            choice_scores_stage,
            {"lease": inputs.lease, "recipe": recipe, "task": asked, "model": model,
             "base": scores},
            {"lease": NO_MATTER_HOW, **cluster, "recipe.cluster.workers": NO_MATTER_HOW,
             "recipe.cluster.strategy": NO_MATTER_HOW,
             **free("cluster", "max_tokens", "batch_size", "dtype")},
        ),
        "adaptation": StageCall(
            adaptation_stage,
            {"recipe": recipe, "task": asked,
             "curves": [Curve("umim-docs-llama", start, scores, [point])]},
            {"curves[0].checkpoint": BY_START, "curves[0].start": BY_START,
             "curves[0].points[0].model": "reaches the stage through its scores",
             "curves[0].points[0].rules": "reaches the stage through the scores of their model"},
        ),
    }  # fmt: skip
