"""A tiny backbone, texts, a recipe and artifacts for a call of every stage."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from support.stage_keys.variations import Artifacts, Edit
from tasks.cluster.lease import ClusterLease
from tasks.run.stage import Artifact
from umim_core.config.recipe import AdaptConfig, HardwareConfig, Recipe
from umim_core.rules.ruleset import RuleSet

TRAIN = {"max_steps": 4, "batch_size": 4}
SPLITS = ("train", "valid", "test", "ood_other")
# Where the reason is the same for several stages.
OF_A_DIRECTORY = "the revision of a directory means nothing; on the hub it is another tokenizer"
BY_RULES = "reaches the stage through its rules"
BY_TOKENS = "reaches the stage through the token ids"
BY_START = "reaches the stage through the checkpoint it starts from"
NO_MATTER_HOW = "where and how fast it runs, not what comes out"
SPECIAL_ALL_THE_SAME = "another special token ends a text; all of them take no part in rules"
NOT_WEIGHTS = "only the tokenizer of the backbone counts, and the other one has the same"
CLUSTER = ("address", "cpus", "max_restarts", "object_store_gib", "parallel_stages")
NOT_TRAINED_ON = (
    "name description corpus mining cells task adapt evaluate benchmark shipped headline hardware"
)
TOKENIZER_EDITS = ("the vocabulary", "the special tokens", "the end of text")
BACKBONE_EDITS = ("the weights", "the model's settings")
ALL_EDITS = (*TOKENIZER_EDITS, *BACKBONE_EDITS, "how the model ends", "the chat template")


class Inputs:
    """What stages are given, on disk: no optional part of a recipe is left out.

    Args:
        folder: Receives them.
        model: A tiny model; saved with its tokenizer, and once more with other weights.
        other: The same shape with other weights.
        tokenizer: With the special tokens ``<eos>``, which ends a text, and ``<end>``.
        checkpoints: Two merge checkpoints of one backbone.
    """

    def __init__(
        self,
        folder: Path,
        model: PreTrainedModel,
        other: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        checkpoints: tuple[Path, Path],
    ) -> None:
        self.artifacts = Artifacts(folder / "artifacts")
        self.backbone, other_backbone = folder / "backbone", folder / "other"
        for path, weights in ((self.backbone, model), (other_backbone, other)):
            weights.save_pretrained(path)
            tokenizer.save_pretrained(path)
        self.text, self.questions = folder / "text.txt", folder / "questions.jsonl"
        for name in (self.text, folder / "other.txt"):
            name.write_text("w1 w2 w3 w4", encoding="utf-8")
        for name in (self.questions, folder / "other.jsonl"):
            name.write_text(json.dumps({"text": "w1 w2"}) + "\n", encoding="utf-8")
        self.checkpoint = checkpoints[0]
        self.rules, other_rules = folder / "rules", folder / "other-rules"
        for path, span in ((self.rules, (1, 2)), (other_rules, (1, 3))):
            RuleSet.from_spans([span]).save(path)
        # Paths and the like must be of something; other values are made by their type.
        self.special: dict[str, object] = {
            "backbone": str(other_backbone),
            "model": str(other_backbone),
            "checkpoint": checkpoints[1],
            "paths": (str(folder / "other.txt"),),
            "packages": ("numpy",),
            "protect": (),
            "rules": str(other_rules),
            "hub": str(self.text.parent / "hub-another"),
            "task_data": str(self.text.parent / "own-another"),
        }
        self.recipe = self._recipe()
        self.cell, self.lease = self.recipe.cells[0], ClusterLease(self.recipe.cluster)

    def _recipe(self) -> Recipe:
        recipe = Recipe.model_validate(
            {
                "name": "all",
                "corpus": {"kind": "docstrings"},
                "mining": {"protect": ["w1."], "min_documents": 2},
                "cells": [{"backbone": str(self.backbone), "adapt": True}],
                "distill": TRAIN,
                "adapt": {"sft": TRAIN, "dpo": TRAIN},
                "benchmark": {},
                "shipped": ["umim-docs-llama"],
                "headline": {"checkpoint": "umim-docs-llama", "benchmark": {}},
                "cluster": {"workers": 2},
            }
        )
        hardware = HardwareConfig(
            name="none", gpus=2, gpu_memory_gib=1,
            shapes={},
        )  # fmt: skip
        return recipe.model_copy(update={"hardware": hardware})

    def edits(self, *names: str) -> dict[str, Edit]:
        """Return changes of the backbone's files, by name."""

        def edit(file: str, old: str, new: str) -> Edit:
            return Edit(self.backbone / file, old.encode(), new.encode())

        weights = (self.backbone / "model.safetensors").read_bytes()
        found = {
            "the vocabulary": edit("tokenizer.json", '"w9"', '"v9"'),
            "the special tokens": edit(
                "tokenizer_config.json", '"eos_token": "<eos>"', '"eos_token": "w9"'
            ),
            "the end of text": edit(
                "tokenizer_config.json", '"eos_token": "<eos>"', '"eos_token": "<end>"'
            ),
            "the weights": Edit(
                self.backbone / "model.safetensors", weights, weights[:-1] + b"\x7f"
            ),
            "the model's settings": edit(
                "config.json", '"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'
            ),
            "how the model ends": edit(
                "generation_config.json", '"eos_token_id": 0', '"eos_token_id": 1'
            ),
            "the chat template": edit("chat_template.jinja", "content", "role"),
        }
        return {name: found[name] for name in names}

    def tokenized(self) -> Artifact:
        """Return token ids of every split."""
        return self.artifacts.make("tokenize", *SPLITS)

    def task(self) -> Artifact:
        """Return the questions of every split."""
        return self.artifacts.make("task", "train.jsonl", "valid.jsonl", "test.jsonl")

    def adapt(self) -> AdaptConfig:
        """Return how the recipe adapts."""
        assert self.recipe.adapt is not None
        return self.recipe.adapt
