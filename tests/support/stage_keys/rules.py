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
from umim_core.config.recipe import Cell
from umim_core.config.rule_options import AS_FOUND, RuleOptions


def rule_calls(inputs: Inputs) -> dict[str, StageCall]:
    """Return a call of every stage that makes rules."""
    cell, options = inputs.cell, inputs.recipe.rule_options(inputs.cell)
    protected = RuleOptions(protect=("w1.",), segment_length=32)
    sure = RuleOptions(
        source="confidence", confidence_tokens=1000, segment_length=32, protect=("w1.",), **AS_FOUND
    )
    model = {"backbone": str(inputs.backbone), "revision": None}
    tokenized, counted = inputs.tokenized(), inputs.artifacts.make("count", "keys_2.npy")
    not_train = {f"tokenized/{split}": "rules are made of training text" for split in SPLITS[1:]}
    not_weights = dict.fromkeys(BACKBONE_EDITS, NOT_WEIGHTS)
    one_tokenizer = {"backbone": NOT_WEIGHTS, "revision": OF_A_DIRECTORY, **not_weights}
    of_a_cell = {"cell.backbone": NOT_WEIGHTS, "cell.revision": OF_A_DIRECTORY, **not_weights}
    form = ("adapt", "module_positions", "depth", "kind", "residual", "rule_rows",
            "unit_positions", "merge_depth", "adapter_rank")  # fmt: skip
    decides = {"cell.rules": "decides which stage is run"}
    not_of_rules = {f"cell.{name}": "a matter of the merge module" for name in form} | decides
    given = Cell(backbone=str(inputs.backbone), rules=str(inputs.rules))
    found_by = ("tau", "longest", "overlap", "containment", "rule_budget", "spans", "source")
    asked = ("min_probability", "confidence_tokens")
    costs = ("block_tokens", "max_memory_gib", "threads")
    limits = {f"options.{name}": NO_MATTER_HOW for name in costs}
    later = ("overlap", "containment", "rule_budget", "spans")
    chosen = {f"options.{name}": "applied by the next stage" for name in later}
    source = {"options.source": "decides which stage is run"}
    not_asked = {f"options.{name}": "of rules by confidence" for name in asked}
    refused = {f"options.{name}": "refused for rules by confidence"
               for name in ("rule_budget", "spans", "longest", "min_documents")}  # fmt: skip
    return {
        "count": StageCall(
            count_stage,
            {"lease": inputs.lease, "tokenized": tokenized, **model, "options": options},
            {
                "lease": NO_MATTER_HOW, **not_train, **one_tokenizer, **limits, **chosen, **source,
                **not_asked,
                "options.min_documents": "counts serve any least number of documents above 1",
                "the vocabulary": BY_TOKENS,
                    "the end of text": SPECIAL_ALL_THE_SAME,
            },
            inputs.edits(*TOKENIZER_EDITS, *BACKBONE_EDITS),
        ),
        "count without documents or a sample": StageCall(
            count_stage,
            {"lease": inputs.lease, "tokenized": tokenized, **model, "options": protected},
            {
                "lease": NO_MATTER_HOW, **not_train, **one_tokenizer, **limits, **chosen, **source,
                **not_asked,
            },
            inputs.edits(*BACKBONE_EDITS),
        ),
        "filter": StageCall(
            filter_stage,
            {"counted": counted, "tokenized": tokenized, **model, "options": options},
            {
                **not_train, **one_tokenizer, **limits, **not_asked, **source,
                "options.protect": "reaches the stage through the counts",
                "the end of text": SPECIAL_ALL_THE_SAME,
            },
            inputs.edits(*TOKENIZER_EDITS, *BACKBONE_EDITS),
        ),
        "confidence": StageCall(
            confidence_stage,
            {"lease": inputs.lease, "tokenized": tokenized, **model, "options": sure,
             "device": "cpu", "dtype": "float32"},
            {
                "lease": NO_MATTER_HOW, **not_train, **limits, **chosen, **source, **refused,
                "options.tau": "applied by the next stage",
                "revision": OF_A_DIRECTORY,
                "the vocabulary": BY_TOKENS,
                    "the end of text": SPECIAL_ALL_THE_SAME,
            },
            inputs.edits(*TOKENIZER_EDITS, *BACKBONE_EDITS),
        ),
        "confidence-rules": StageCall(
            confidence_rules_stage,
            {"counted": counted, **model, "options": sure},
            {
                **one_tokenizer, **limits, **source, **refused,
                "options.confidence_tokens": "reaches the stage through the runs",
                "the end of text": SPECIAL_ALL_THE_SAME,
            },
            inputs.edits(*TOKENIZER_EDITS, *BACKBONE_EDITS),
        ),
        "given-rules": StageCall(
            given_rules_stage,
            {"cell": given},
            {
                **of_a_cell,
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
                **of_a_cell, **not_of_rules,
                **{f"cell.{name}": "the task has rules of its own" for name in (*found_by, *asked)},
                "the end of text": SPECIAL_ALL_THE_SAME,
            },
            inputs.edits(*TOKENIZER_EDITS, *BACKBONE_EDITS),
        ),
    }  # fmt: skip
