"""Stages ``tokenizer`` and ``backbone``: a small language model from nothing."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from tasks.cluster.lease import ClusterLease
from tasks.report.backbone_card import backbone_card, describe_training
from tasks.run.stage import Artifact, Metrics, StageSpec, run_stage
from tasks.stages.corpus import texts
from tasks.stages.distill import parallelism
from tasks.training.language_model import LanguageModelJob, train_language_model
from tasks.training.train_worker import launch_worker
from umim_core.backbone.backbone import Backbone, load_backbone
from umim_core.backbone.devices import default_device
from umim_core.config.backbone_recipe import BackboneRecipe
from umim_core.embedded.docs_tokenizer import train_tokenizer
from umim_core.evaluation.language_model import LanguageModelScore, score_language_model

HELD_OUT = ("valid", "test")


def tokenizer_stage(root: Path, corpus: Artifact, recipe: BackboneRecipe) -> Artifact:
    """Train the byte-level BPE on the training split: ``tokenizer/``."""
    positions = recipe.architecture.max_positions
    spec = StageSpec(
        "tokenizer",
        1,
        {"vocab_size": recipe.vocab_size, "max_positions": positions},
        {"corpus": corpus.digest},
    )

    def build(out: Path) -> Metrics:
        tokenizer = train_tokenizer(
            texts(corpus, recipe.corpus, "train"),
            out / "tokenizer",
            recipe.vocab_size,
            max_positions=positions,
        )
        return {"entries": float(len(tokenizer))}

    return run_stage(root, spec, build)


def backbone_stage(
    root: Path,
    lease: ClusterLease,
    recipe: BackboneRecipe,
    corpus: Artifact,
    tokenizer: Artifact,
    tokenized: Artifact,
) -> Artifact:
    """Train a language model and measure it on the whole held-out splits.

    The artifact holds ``backbone/`` (bfloat16 weights, tokenizer, model card), ``curve.jsonl`` and
    ``summary.json``. A killed build resumes from its last state.
    """
    architecture, train = recipe.architecture.model_dump(), recipe.train.model_dump()
    spec = StageSpec(
        "backbone",
        2,
        {
            "name": recipe.name,  # the model card's title
            "architecture": architecture,
            "train": train,
            "seed": recipe.seed,
            **parallelism(recipe.cluster),
        },
        {"tokenizer": tokenizer.digest, "tokens": tokenized.digest},
        resumable=True,
    )

    def build(out: Path) -> Metrics:
        job = LanguageModelJob(
            architecture=architecture,
            tokenizer=str(tokenizer.path / "tokenizer"),
            train=str(tokenized.path / "train"),
            valid=str(tokenized.path / "valid"),
            seed=recipe.seed,
            config=train,
            strategy=recipe.cluster.strategy,
            use_gpu=recipe.cluster.use_gpu,
            out=str(out),
        )
        summary = launch_worker(train_language_model, asdict(job), out, lease)
        backbone = _load(out / "backbone", recipe.cluster.use_gpu)
        scores: dict[str, LanguageModelScore] = {
            split: score_language_model(
                texts(corpus, recipe.corpus, split), backbone, length=recipe.train.sequence_length
            )
            for split in HELD_OUT
        }
        training = describe_training(recipe, summary, int(tokenized.metrics["tokens_train"]))
        card = backbone_card(recipe, backbone, training, scores)
        (out / "backbone" / "README.md").write_text(card, encoding="utf-8")
        for split, score in scores.items():
            summary[f"{split}_nats_per_token"] = score.nats_per_token
            summary[f"{split}_bits_per_byte"] = score.bits_per_byte
        return summary

    return run_stage(root, spec, build)


def _load(directory: Path, use_gpu: bool) -> Backbone:
    device = default_device() if use_gpu else "cpu"
    return load_backbone(str(directory), device=device)
