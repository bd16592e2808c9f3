"""Predicted cost of a recipe: mining per backbone, distillation per cell."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from tasks.report.compare import cell_row
from umim_core.backbone.shape import BackboneShape, local_shape
from umim_core.benchmarking.roofline import measure_peak
from umim_core.config.adaptation_recipe import AdaptationRecipe
from umim_core.config.corpus import FilesCorpus, GeneratedCorpus, MixtureCorpus
from umim_core.config.hardware import HardwareConfig
from umim_core.config.recipe import Cell, Recipe, RunRecipe
from umim_core.config.table_recipe import TableRecipe
from umim_core.cost.distillation_law import MFU, predict_distillation
from umim_core.cost.mining_forecast import predict_mining
from umim_core.cost.prediction import Limits, Prediction
from umim_core.distill.train_loop import planned_steps
from umim_core.errors import ConfigError, UnknownSizeError
from umim_core.mining.mining_options import MiningOptions
from umim_core.text.sources import HubDataset

# Of the rate of large float32 products. On the reference machine (100-140 GFLOP/s) whole steps came
# to 134 GFLOP/s (embedded backbone, 8 x 512) and 93 (SmolLM2-135M, 4 x 512), both under bfloat16:
# what is not a product takes what the faster products save.
_SHARE: Final = 0.8
_LEAST_SECONDS: Final = 0.2  # of a step: thousands of small operations, whatever the sizes


@dataclass(frozen=True)
class RecipeCost:
    """Predicted cost of a recipe.

    Attributes:
        mining: By backbone; only where the recipe's text tells it before the run.
        mining_unpredicted: Why mining is not predicted; None if it is, or nothing is mined.
        distillation: On the recipe's GPUs, by cell; nothing for a recipe without hardware.
        distillation_here: On this machine's processor, by cell.
    """

    mining: dict[str, Prediction]
    mining_unpredicted: str | None
    distillation: dict[str, Prediction]
    distillation_here: dict[str, Prediction]

    def as_dict(self) -> dict[str, object]:
        """Return the numbers for JSON; what is not predicted is left out."""
        document: dict[str, object] = {
            "mining": {backbone: cost.as_dict() for backbone, cost in self.mining.items()}
        }
        if self.mining_unpredicted is not None:
            document["mining_unpredicted"] = self.mining_unpredicted
        for name in ("distillation", "distillation_here"):
            if cost := getattr(self, name):
                document[name] = [{"cell": label} | one.as_dict() for label, one in cost.items()]
        return document

    def lines(self) -> list[str]:
        """Return the predictions for people, cells that take the same together."""
        lines: list[str] = []
        for backbone, cost in self.mining.items():
            lines += ["", f"mining for {backbone}, predicted from a sample:", *cost.lines()]
        if self.mining_unpredicted is not None:
            lines += ["", f"mining is not predicted: {self.mining_unpredicted}"]
        for cells in (self.distillation, self.distillation_here):
            groups: dict[tuple[str, ...], list[str]] = {}
            for label, one in cells.items():
                groups.setdefault(tuple(one.lines()), []).append(label)
            for text, labels in groups.items():
                lines += ["", "distillation, predicted from shapes, each of:"]
                lines += [*(f"  - {label}" for label in labels), *text]
        return lines

    def check(self) -> None:
        """Refuse what exceeds the recipe's limits or the memory of its GPUs.

        Raises:
            ResourceLimitError: If there is such a prediction.
        """
        for cost in (*self.mining.values(), *self.distillation.values()):
            cost.check()


def predict_recipe(recipe: RunRecipe) -> RecipeCost:
    """Predict the cost of a recipe; nothing is downloaded for it.

    Raises:
        CorpusError: If the text to be mined cannot be read.
        ConfigError: If a protected pattern is malformed, or the shape of a backbone on the recipe's
            hardware is not known, or not the one of its configuration.
    """
    if isinstance(recipe, TableRecipe | AdaptationRecipe):  # it mines no corpus
        return RecipeCost({}, None, {}, {})
    reason = unpredictable(recipe)
    if not isinstance(recipe, Recipe):
        return RecipeCost({}, reason, {}, {})
    mining = _predict_mining(recipe) if reason is None else {}
    tokens = {backbone: int(cost.figures["tokens"]) for backbone, cost in mining.items()}
    on_gpus, here = predict_on_gpus(recipe, tokens), _predict_here(recipe, tokens)
    return RecipeCost(mining, reason, on_gpus, here)


def unpredictable(recipe: RunRecipe) -> str | None:
    """Say why mining cannot be predicted before the run; None if it can, or nothing is mined.

    Nor can the generation of a corpus, and the reason says so. A docstring corpus is silently left
    out: it is small.
    """
    corpus = recipe.corpus
    if isinstance(corpus, GeneratedCorpus):
        return "the corpus is generated by the run, which is not predicted either"
    if isinstance(corpus, MixtureCorpus):
        return "the corpus is mixed by the run's first stages"
    if not isinstance(corpus, FilesCorpus) or not isinstance(corpus.train, HubDataset):
        return None
    if Path(corpus.train.name).is_dir():
        return None
    return f"data set {corpus.train.name} is on the hub, and a prediction downloads nothing"


def _predict_mining(recipe: Recipe) -> dict[str, Prediction]:
    """Predict mining per backbone, from about 10 MB of the recipe's own text.

    A corpus is left out whose size neither its files nor ``train_tokens`` tell, or that is small.
    """
    if not isinstance(recipe.corpus, FilesCorpus):
        return {}
    mining, found = recipe.mining, {}
    limits = Limits(mining.max_memory_gib, mining.max_disk_gib, mining.max_hours)
    counted = [cell for cell in recipe.cells if cell.source == "frequency" and cell.rules is None]
    for backbone, revision in dict.fromkeys((cell.backbone, cell.revision) for cell in counted):
        cells = [cell for cell in counted if (cell.backbone, cell.revision) == (backbone, revision)]
        try:
            cost = predict_mining(
                recipe.corpus.train,
                tokenizer=backbone,
                revision=revision,
                options=MiningOptions(
                    tau=min(cell.tau for cell in cells),
                    segment_length=recipe.segment_length,
                    protect=mining.protect,
                    min_documents=mining.min_documents,
                    sample_tokens=mining.sample_tokens,
                    max_candidates=mining.max_candidates,
                ),
                at_most=recipe.corpus.train_tokens,
                block_tokens=mining.block_tokens,
                workers=recipe.cluster.cpus or os.cpu_count() or 1,
            )
        except UnknownSizeError:
            continue
        if cost is not None:
            found[backbone] = replace(cost, limits=limits)
    return found


def predict_on_gpus(recipe: Recipe, tokens: Mapping[str, int]) -> dict[str, Prediction]:
    """Predict memory and time of every cell's distillation on the recipe's hardware.

    Args:
        recipe: What would be run.
        tokens: Tokens of the corpus by backbone, where mining was predicted.

    Returns:
        One per cell, under its label; nothing for a recipe without hardware.

    Raises:
        ConfigError: If the shape of a backbone is not known, or not the one of its configuration.
    """
    hardware, found = recipe.hardware, {}
    for cell in recipe.cells if hardware is not None else ():
        bf16 = recipe.placement[1] == "bfloat16"
        cost = _predict_cell(recipe, cell, tokens, _shape(hardware, cell), hardware, bf16)
        label = cell_row(cell).label
        found[label] = replace(cost, work=f"distillation of {label}")
    return found


def _predict_here(recipe: Recipe, tokens: Mapping[str, int]) -> dict[str, Prediction]:
    """Predict the time of cells' distillation on this processor; its rate is measured in a second.

    Cells are left out whose backbone is not on this machine or of an unknown family; all for GPUs.
    """
    gflops, found = None, {}
    for cell in recipe.cells if not recipe.cluster.use_gpu else ():
        try:
            shape = local_shape(cell.backbone, cell.revision)
        except ConfigError:  # a family whose shape its configuration does not tell
            continue
        if shape is None:
            continue
        gflops = gflops or measure_peak(torch.device("cpu"), torch.float32).peak_flops / 1e9
        processor = HardwareConfig(
            name="processor",
            gpus=1,
            gpu_memory_gib=1.0,
            bf16_tflops=_SHARE / MFU * gflops / 1e3,
            memory_bandwidth_gbs=1e6,
        )
        cost = _predict_cell(recipe, cell, tokens, shape, processor, recipe.distill.bf16).figures
        step, steps = max(_LEAST_SECONDS, cost["step_seconds"]), cost["steps"]
        figures = {name: cost[name] for name in ("steps", "token_reduction")}
        found[cell_row(cell).label] = Prediction(
            work="distillation",
            basis="this machine's processor, validation left out",
            remedy="Lower distill.max_steps, or use a GPU.",
            seconds={"all steps": steps * step},
            figures=figures | {"step_seconds": step, "gflops": gflops},
            notes={
                "steps at most": f"{steps:,}",
                "time of a step": f"about {step:.2g} s",
                "assumed": f"token reduction {cost['token_reduction']:.0%}, {_SHARE:.0%} of the "
                f"{gflops:,.0f} GFLOP/s that large float32 products reach here now",
            },
        )
    return found


def _predict_cell(
    recipe: Recipe,
    cell: Cell,
    tokens: Mapping[str, int],
    shape: BackboneShape,
    hardware: HardwareConfig,
    bf16: bool,
) -> Prediction:
    config = recipe.distill
    read = tokens.get(cell.backbone, recipe.corpus.train_tokens)
    segments = None if read is None else read // recipe.segment_length
    return predict_distillation(
        shape,
        cell,
        rows=config.batch_size // hardware.gpus,
        micro_batch=config.micro_batch,
        segment_length=recipe.segment_length,
        bf16=bf16,
        strategy=recipe.cluster.strategy,
        hardware=hardware,
        steps=config.max_steps if segments is None else planned_steps(config, segments),
    )


def _shape(hardware: HardwareConfig, cell: Cell) -> BackboneShape:
    stated = hardware.shapes.get(cell.backbone)
    try:
        here = local_shape(cell.backbone, cell.revision)
    except ConfigError:
        if stated is None:
            raise
        return stated
    shape = here or stated
    if shape is None:
        raise ConfigError(
            "hardware.shapes must tell the shape of a backbone that is not on this machine",
            cell.backbone,
            "Copy it from the backbone's config.json.",
        )
    if stated is not None and stated != shape:
        raise ConfigError(
            f"hardware.shapes must agree with the configuration of {cell.backbone}",
            str(stated),
            f"It is {shape}.",
        )
    return shape
