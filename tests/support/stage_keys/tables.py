"""Calls of the stages that measure a table of the paper, and what their keys must not hold."""

from __future__ import annotations

from support.stage_keys.inputs import CLUSTER, NO_MATTER_HOW, Inputs
from support.stage_keys.variations import Edit, StageCall
from tasks.stages.table import (
    mined_stage,
    questions_stage,
    shards_stage,
    table_stage,
    text_stage,
)
from umim_core.config.recipe import DEFAULT_TASK
from umim_core.config.table_recipe import TableRecipe

_BY_QUESTIONS = "reaches the stage through the questions"
_BY_SCORES = "reaches the stage through what was measured"
_NAMES = "a name, a description, or a seed that nothing draws by"


def table_calls(inputs: Inputs) -> dict[str, StageCall]:
    """Return a call of every stage of a table."""
    folder = inputs.text.parent
    for name in ("hub", "hub-another", "own", "own-another"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "test.jsonl").write_text(name, encoding="utf-8")
    text = {"source": {"kind": "text", "paths": [str(inputs.text)]}, "methods": ["truncation"]}
    settings = [
        {"name": "base", "merge": "none"},
        {"name": "own", "merge": "prompt", "protect": ["digits"]},
    ]
    recipe = TableRecipe.model_validate(
        {"name": "t", "kind": "table", "table": "tab:QA", "checkpoint": "", "settings": settings,
         "tasks": [DEFAULT_TASK], "texts": {"t": text}}
    ).model_copy(update={"checkpoint": inputs.checkpoint})  # fmt: skip
    chosen = recipe.model_copy(
        update={"hub": str(folder / "hub"), "task_data": str(folder / "own")}
    )
    generated = recipe.model_copy(update={"hub": str(folder / "hub"), "new_tokens": 8})
    make, own = inputs.artifacts.make, recipe.settings[1]
    cluster = (*CLUSTER, "workers", "strategy")
    free = {f"recipe.cluster.{name}": NO_MATTER_HOW for name in cluster}
    named = dict.fromkeys(("recipe.name", "recipe.description"), _NAMES)
    seed = {"recipe.seed": _NAMES}
    table = {"recipe.table": "where it is shown"}
    limits = ("new_tokens", "answers")
    asked = {f"recipe.{name}": _BY_QUESTIONS for name in ("tasks", "hub", "task_data", *limits)}
    confirmed = {
        "recipe.confirm_run_unsafe_code": "a permission",
        "recipe.backbone": "where it lies: it must have the checkpoint's fingerprint, which counts",
    }
    shards = {"recipe.questions": "of stage shards", "recipe.shard": "of stage shards"}
    scored = dict.fromkeys(
        ("recipe.shard", "recipe.settings", "recipe.texts", "recipe.batch_size", "recipe.dtype",
         "recipe.cores", "recipe.cluster.use_gpu"),
        "of the stages that score",
    )  # fmt: skip
    asking = {
        "lease": NO_MATTER_HOW, **free, **named, **table, **confirmed, **scored,
        "recipe.tasks": "the stage is given one of them",
    }  # fmt: skip
    sizes = ("shard", "batch_size", "cores", "texts", "cluster")
    ways = {
        f"recipe.settings[{number}].{name}": _BY_SCORES
        for number in (0, 1)
        for name in ("merge", "raw_tail", "method", "target_tr", "protect", "mine_tau")
    }
    answers = ("recipe.questions", "recipe.checkpoint", *(f"recipe.{name}" for name in limits))
    return {
        "questions": StageCall(
            questions_stage,
            {"lease": inputs.lease, "recipe": chosen, "task": DEFAULT_TASK},
            {**asking, **seed, **dict.fromkeys(answers, "of answers that are generated")},
        ),
        "questions of generated answers": StageCall(
            questions_stage,
            {"lease": inputs.lease, "recipe": generated, "task": "umim_amc23"},
            {**asking, "recipe.checkpoint": _BY_SCORES,
             "recipe.questions": "of stage shards"},
        ),
        "mined": StageCall(
            mined_stage,
            {"recipe": recipe, "task": "umim_ruler_1k", "tau": 5,
             "questions": make("questions", "questions.json")},
            {**free, **named, **table, **confirmed, **scored,
             **{name: reason for name, reason in asked.items() if name != "recipe.new_tokens"},
             "recipe.settings": "the stage is given the threshold"},
        ),
        "shards": StageCall(
            shards_stage,
            {"lease": inputs.lease, "recipe": recipe, "setting": own, "mined": None,
             "questions": make("questions", "questions.json", task=DEFAULT_TASK, lm_eval="0")},
            {"lease": NO_MATTER_HOW, **free, **named, **seed, **table, **asked, **confirmed,
             "recipe.settings": "the stage is given one of them", "setting.name": "a name",
             "recipe.texts": "of stage text"},
        ),
        "shards of generated answers": StageCall(
            shards_stage,
            {"lease": inputs.lease, "recipe": generated, "setting": own, "mined": None,
             "questions": make("questions", "questions.json", task="umim_amc23", lm_eval="0",
                               generation="its limits, its seed")},
            {"lease": NO_MATTER_HOW, **free, **named, **seed, **table, **asked, **confirmed,
             "recipe.settings": "the stage is given one of them", "setting.name": "a name",
             "recipe.texts": "of stage text"},
        ),
        "text": StageCall(
            text_stage,
            {"lease": inputs.lease, "recipe": recipe, "text": recipe.texts["t"]},
            {"lease": NO_MATTER_HOW, **free, **named, **seed, **table, **asked, **shards,
             **confirmed,
             "recipe.settings": "of stage shards", "recipe.texts": "the stage is given one",
             "text.source.paths": "only the content counts, and the other one has the same"},
            {"the text": Edit(inputs.text, b"w1", b"w9")},
        ),
        "table": StageCall(
            table_stage,
            {"recipe": recipe, "texts": {"t": make("text", "x")},
             "questions": {DEFAULT_TASK: make("questions", "questions.json")},
             "scores": {(DEFAULT_TASK, s.name): make("shards", "shards", changed=s.name)
                        for s in recipe.settings}},
            {**ways, **{f"recipe.{name}": _BY_SCORES for name in sizes}, **confirmed,
             **{name: _BY_SCORES for name in asked if name.rpartition(".")[2] not in limits},
             "recipe.description": _NAMES},
        ),
    }  # fmt: skip
