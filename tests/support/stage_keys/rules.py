"""Calls of the stages that make rules, and what their keys must not hold."""

from __future__ import annotations

from support.stage_keys.inputs import (
    BACKBONE_EDITS,
    BY_TOKENS,
    NO_MATTER_HOW,
    NOT_WEIGHTS,
    OF_A_DIRECTORY,
    SPECIAL_ALL_THE_SAME,
    SPLITS,
    TOKENIZER_EDITS,
    Inputs,
)
from support.stage_keys.variations import StageCall
from tasks.stages.mine import (
    confidence_rules_stage,
    confidence_stage,
    count_stage,
    filter_stage,
    given_rules_stage,
)
from tasks.stages.train import task_rules_stage
from umim_core.config.recipe import Cell, MiningConfig


def rule_calls(inputs: Inputs) -> dict[str, StageCall]:
    """Return a call of every stage that makes rules."""
    cell, mining = inputs.cell, inputs.recipe.mining
    tokenized, counted = inputs.tokenized(), inputs.artifacts.make("count", "keys_2.npy")
    sure = Cell(backbone=str(inputs.backbone), source="confidence", confidence_tokens=1000)
    not_train = {f"tokenized/{split}": "rules are made of training text" for split in SPLITS[1:]}
    one_tokenizer = {
        "cell.backbone": NOT_WEIGHTS,
        "cell.revision": OF_A_DIRECTORY,
        **dict.fromkeys(BACKBONE_EDITS, NOT_WEIGHTS),
    }
    form = ("adapt", "module_positions", "depth", "kind", "residual", "rule_rows",
            "unit_positions", "merge_depth", "adapter_rank")  # fmt: skip
    decides = {"cell.rules": "decides which stage is run"}
    not_of_rules = {f"cell.{name}": "a matter of the merge module" for name in form} | decides
    given = Cell(backbone=str(inputs.backbone), rules=str(inputs.rules))
    found_by = ("tau", "overlap", "containment", "rule_budget", "spans", "source")
    asked = ("min_probability", "confidence_tokens")
    costs = ("block_tokens", "max_memory_gib")
    limits = {f"config.{name}": NO_MATTER_HOW for name in costs}
    chosen = {f"cell.{name}": "applied by the next stage" for name in found_by}
    not_asked = {f"cell.{name}": "of rules by confidence" for name in asked}
    return {
        "count": StageCall(
            count_stage,
            {"lease": inputs.lease, "tokenized": tokenized, "cell": cell, "tau": 5,
             "segment_length": 32, "config": mining},
            {
                "lease": NO_MATTER_HOW, **not_train, **one_tokenizer, **not_of_rules, **limits,
                **chosen, **not_asked,
                "config.min_documents": "counts serve any least number of documents above 1",
                "the vocabulary": BY_TOKENS,
                    "the end of text": SPECIAL_ALL_THE_SAME,
            },
            inputs.edits(*TOKENIZER_EDITS, *BACKBONE_EDITS),
        ),
        "count without documents or a sample": StageCall(
            count_stage,
            {"lease": inputs.lease, "tokenized": tokenized, "cell": cell, "tau": 5,
             "segment_length": 32, "config": MiningConfig(protect=("w1.",))},
            {
                "lease": NO_MATTER_HOW, **not_train, **one_tokenizer, **not_of_rules, **limits,
                **chosen, **not_asked,
            },
            inputs.edits(*BACKBONE_EDITS),
        ),
        "filter": StageCall(
            filter_stage,
            {"counted": counted, "tokenized": tokenized, "cell": cell, "segment_length": 32,
             "config": mining},
            {
                **not_train, **one_tokenizer, **not_of_rules, **limits, **not_asked,
                "cell.source": "decides which stage is run",
                "config.protect": "reaches the stage through the counts",
                "the end of text": SPECIAL_ALL_THE_SAME,
            },
            inputs.edits(*TOKENIZER_EDITS, *BACKBONE_EDITS),
        ),
        "confidence": StageCall(
            confidence_stage,
            {"lease": inputs.lease, "tokenized": tokenized, "cell": sure, "segment_length": 32,
             "config": mining, "device": "cpu", "dtype": "float32"},
            {
                "lease": NO_MATTER_HOW, **not_train, **not_of_rules, **limits, **chosen,
                "cell.revision": OF_A_DIRECTORY,
                "config.min_documents": "refused for rules by confidence",
                "the vocabulary": BY_TOKENS,
                    "the end of text": SPECIAL_ALL_THE_SAME,
            },
            inputs.edits(*TOKENIZER_EDITS, *BACKBONE_EDITS),
        ),
        "confidence-rules": StageCall(
            confidence_rules_stage,
            {"counted": counted, "cell": sure, "segment_length": 32, "config": mining},
            {
                **one_tokenizer, **not_of_rules, **limits,
                "config.min_documents": "refused for rules by confidence",
                "cell.source": "decides which stage is run",
                "cell.overlap": "refused for rules by confidence, but as it is",
                "cell.containment": "refused for rules by confidence, but as it is",
                "cell.rule_budget": "refused for rules by confidence",
                "cell.spans": "refused for rules by confidence",
                "cell.min_probability": "reaches the stage through the runs",
                "cell.confidence_tokens": "reaches the stage through the runs",
                "the end of text": SPECIAL_ALL_THE_SAME,
            },
            inputs.edits(*TOKENIZER_EDITS, *BACKBONE_EDITS),
        ),
        "given-rules": StageCall(
            given_rules_stage,
            {"cell": given},
            {
                **one_tokenizer,
                **{f"cell.{name}": "a matter of the merge module" for name in form},
                **{f"cell.{name}": "refused for given rules" for name in (*found_by, *asked)},
                "the end of text": "rules are not made anew",
            },
            inputs.edits(*TOKENIZER_EDITS, *BACKBONE_EDITS),
        ),
        "task-rules": StageCall(
            task_rules_stage,
            {"task": inputs.task(), "cell": cell, "rules": inputs.adapt().rules,
             "max_tokens": 32},
            {
                **one_tokenizer, **not_of_rules, **not_asked,
                **{f"cell.{name}": "the task has rules of its own" for name in found_by},
                "the end of text": SPECIAL_ALL_THE_SAME,
            },
            inputs.edits(*TOKENIZER_EDITS, *BACKBONE_EDITS),
        ),
    }  # fmt: skip
