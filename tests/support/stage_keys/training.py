"""Calls of the stages that train, and what their keys must not hold."""

from __future__ import annotations

from support.stage_keys.inputs import (
    BACKBONE_EDITS,
    BY_RULES,
    BY_START,
    CLUSTER,
    NO_MATTER_HOW,
    NOT_TRAINED_ON,
    TOKENIZER_EDITS,
    Inputs,
)
from support.stage_keys.variations import StageCall
from tasks.stages.train import distill_stage, dpo_stage, sft_stage, with_rules_stage


def training_calls(inputs: Inputs) -> dict[str, StageCall]:
    """Return a call of every stage that trains."""
    recipe, cell = inputs.recipe, inputs.cell
    start = inputs.artifacts.make("with-rules", "checkpoint")
    rules_of = ("tau", "longest", "overlap", "containment", "rule_budget", "spans", "source",
                "min_probability", "confidence_tokens", "adapt", "rules")  # fmt: skip
    not_ours = {
        f"recipe.{name}": "of another stage; what it makes is an input"
        for name in NOT_TRAINED_ON.split()
    } | {f"recipe.cluster.{name}": NO_MATTER_HOW for name in CLUSTER}
    lease = {"lease": "the recipe's cluster is in the key"}
    form = ("module_positions", "depth", "kind", "residual", "rule_rows", "unit_positions",
            "merge_depth", "adapter_rank")  # fmt: skip
    tuned = {"recipe.distill": BY_START, "recipe.segment_length": BY_START}
    tuned |= {f"cell.{name}": BY_START for name in (*form, *rules_of)}
    tuned |= dict.fromkeys((*BACKBONE_EDITS, *TOKENIZER_EDITS), BY_START)
    chosen = {"adapt.settings": "decides which stages are run"}
    shared = {"lease": inputs.lease, "recipe": recipe, "adapt": inputs.adapt(), "cell": cell,
              "task": inputs.task(), "start": start}  # fmt: skip
    edits = inputs.edits(*TOKENIZER_EDITS, *BACKBONE_EDITS)
    return {
        "distill": StageCall(
            distill_stage,
            {"lease": inputs.lease, "recipe": recipe, "cell": cell,
             "tokenized": inputs.tokenized(),
             "filtered": inputs.artifacts.make("filter", "rules")},
            {
                **lease, **not_ours, **{f"cell.{name}": BY_RULES for name in rules_of},
                "tokenized/test": "is not trained on",
                "tokenized/ood_other": "is not trained on",
                **dict.fromkeys(TOKENIZER_EDITS, "reaches the stage through rules and ids"),
            },
            edits,
        ),
        "with-rules": StageCall(
            with_rules_stage,
            {"distilled": start, "task_rules": inputs.artifacts.make("task-rules", "rules")},
            {},
        ),
        "sft": StageCall(
            sft_stage, shared,
            {**lease, **not_ours, **tuned, **chosen, "adapt.dpo": "of the next stage",
             "adapt.rules": "reaches the stage through its rules"},
            edits,
        ),
        "sft from random weights": StageCall(
            sft_stage, {**shared, "start": inputs.artifacts.make("task-rules", "rules")},
            {**lease, **not_ours, **chosen, "adapt.dpo": "of another stage",
             "adapt.rules": BY_RULES, **{f"cell.{name}": BY_RULES for name in rules_of},
             "recipe.distill": "of another stage", "recipe.segment_length": "of another stage",
             **dict.fromkeys(TOKENIZER_EDITS, BY_RULES)},
            edits,
        ),
        "dpo": StageCall(
            dpo_stage, shared,
            {**lease, **not_ours, **tuned, **chosen, "adapt.sft": BY_START,
             "adapt.rules": BY_START},
            edits,
        ),
    }  # fmt: skip
