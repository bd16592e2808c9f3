"""Recipes: everything a pipeline run needs, validated before anything starts.

A recipe is a YAML file, under ``infra/recipes`` or the user's own; it is saved with the results.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from umim_core.backbone.shape import BackboneShape
from umim_core.config.corpus import Corpus
from umim_core.config.evaluate import BenchmarkConfig, EvaluateConfig, HeadlineConfig, TaskSizes
from umim_core.config.form import ModuleForm, check_row_rate
from umim_core.config.model_base import (
    DIFFERENT,
    AtLeast0,
    AtLeast1,
    Fraction,
    Model,
    PositiveFloat,
    Seed,
    checking,
)
from umim_core.config.rule_options import (
    AS_FOUND,
    MiningConfig,
    RuleFilters,
    RuleOptions,
    RuleSearch,
)

Device = Literal["cpu", "cuda"]
BackboneDtype = Literal["float32", "bfloat16"]
DEFAULT_TASK: Final = "umim_docstrings"


class HardwareConfig(Model):
    """GPUs of one machine, and the shapes of the backbones that are trained on them."""

    name: Annotated[str, Field(min_length=1)]
    """Name of the GPU."""
    gpus: AtLeast1
    """How many; one training worker each."""
    gpu_memory_gib: PositiveFloat
    """Memory of one, GiB."""
    shapes: dict[str, BackboneShape] = Field(default_factory=dict)
    """Shapes of backbones that may not be on this machine."""


class Cell(RuleSearch, ModuleForm):
    """One compared configuration: a backbone, its rules and the form of its merge module.

    A cell that names a rule directory (``rules``) has no other fields of rules: nothing is mined.
    """

    source: Literal["frequency", "confidence"] = "frequency"
    """Frequent n-grams, or spans the backbone is confident about."""
    rules: Annotated[str | None, Field(min_length=1)] = None
    """Rule directory that umim mine wrote; then nothing is mined."""
    backbone: str
    """Embedded name, directory or hub repository."""
    revision: str | None = None
    """Hub revision of the backbone."""
    adapt: bool = False
    """Also adapt this cell to the task."""

    @model_validator(mode="before")
    @classmethod
    def _confident_as_found(cls, raw: object) -> object:
        if isinstance(raw, dict) and raw.get("source") == "confidence":
            return AS_FOUND | raw
        return raw

    @model_validator(mode="after")
    def _rules_of_a_cell(self) -> Self:
        if self.rules is not None:
            for name, field in RuleSearch.model_fields.items():
                if getattr(self, name) != field.default:
                    raise ValueError(f"{name} belongs to mining, rules are given; leave it out")
        elif self.source == "confidence":
            for name, value in AS_FOUND.items():
                if getattr(self, name) != value:
                    raise ValueError(
                        f"confidence rules are taken as they are found: {name} must be {value!r}; "
                        "leave it out"
                    )
        return self


class TrainConfig(Model):
    """Optimisation of the merge module; defaults are the paper's where it prints them."""

    max_steps: AtLeast1
    """Optimiser steps at most."""
    max_epochs: Annotated[int, Field(ge=1, le=1000)] = 15
    """Passes over the rows at most."""
    batch_size: AtLeast1 = 8
    """Rows of the global batch."""
    learning_rate: Annotated[float, Field(gt=0.0, le=1.0)] = 8e-4
    """After the warm-up; then it falls to 0."""
    weight_decay: Annotated[float, Field(ge=0.0, le=1.0)] = 1e-3
    """Of AdamW: each step shrinks weights by this times the learning rate."""
    warmup_fraction: Fraction = 0.1
    """Share of the steps in which the learning rate rises from 0."""
    clip_norm: PositiveFloat = 1.0
    """Norm of the gradient at most; a longer one is scaled down."""
    validate_every: AtLeast1 = 50
    """Steps between validations."""
    validation_rows: AtLeast1 = 64
    """Validation rows at most."""
    patience: AtLeast1 = 3
    """Validations without improvement."""
    checkpoint_every: AtLeast1 = 50
    """Steps between resume states."""
    max_skipped_steps: AtLeast0 = 5
    """Steps skipped for NaN or infinity before the run fails."""


class DistillConfig(TrainConfig):
    """Optimisation of a distillation stage."""

    bf16: bool = True
    """Products in bfloat16, where a device computes it; on GPUs weights are, too."""
    micro_batch: AtLeast1 | None = None
    """Rows at most whose activations a worker holds; null: 4, on a GPU all."""
    row_rate: PositiveFloat = 1.0
    """Learning rate of rule rows, as a multiple of the module's."""

    prompt_rows: Fraction = 0.0
    """Share of rows with a merged start, whose raw rest has the loss."""
    copy_rows: Fraction = 0.0
    """Share of rows that repeat their merged first half raw, with the loss there."""

    @model_validator(mode="after")
    def _shares_of_rows(self) -> Self:
        if self.prompt_rows + self.copy_rows > 1.0:
            raise ValueError("prompt_rows and copy_rows must add up to 1 at most")
        return self

    def backbone_dtype(self, device: Device) -> BackboneDtype:
        """Return the data type of the frozen backbone's weights; what is measured takes it, too.

        CPUs keep float32 weights under autocast.
        """
        return "bfloat16" if self.bf16 and device == "cuda" else "float32"


class PreferenceConfig(TrainConfig):
    """Optimisation of the preference (DPO) stage, in float32 everywhere.

    What is compared are differences of log-probabilities. A step moves them by less than a
    thousandth, which the rounding of bfloat16 hides.
    """

    beta: PositiveFloat = 0.1
    """Weight of a change of log-probability; the larger, the closer to the start."""
    weight_decay: Annotated[float, Field(ge=0.0, le=1.0)] = 1e-4
    """Of AdamW: each step shrinks weights by this times the learning rate."""
    micro_batch: AtLeast1 | None = None
    """Questions at most whose activations a worker holds; null: all."""

    def backbone_dtype(self, _: Device) -> BackboneDtype:
        """Return the data type of the frozen backbone's weights."""
        return "float32"


class AdaptConfig(Model):
    """Task adaptation: task rules, distillation-based SFT, then DPO."""

    settings: Annotated[tuple[str, ...], Field(min_length=1), DIFFERENT] = (
        "WT + Rules",
        "WT + FT",
        "Task-Adapted",
    )
    """Settings compared, of the table in umim_core/adaptation/settings.py."""

    rules: RuleFilters = RuleFilters(tau=5, overlap="none", containment="keep")
    max_tokens: Annotated[int, Field(ge=8)] = 512
    """Longer questions lose their beginning."""
    sft: DistillConfig
    dpo: PreferenceConfig


class ClusterConfig(Model):
    """Cluster and devices of a run."""

    address: str | None = None
    """Ray address; null starts a local cluster."""
    cpus: AtLeast1 | None = None
    """CPU cores of a local cluster; null: all."""
    workers: AtLeast0 = 1
    """Training workers; 0 = in process."""
    use_gpu: bool = False
    """Whether each worker has a GPU."""
    strategy: Literal["ddp", "deepspeed"] = "ddp"
    """How workers exchange gradients: DDP, or ZeRO-2 of DeepSpeed."""
    max_restarts: AtLeast0 = 2
    """Restarts of lost workers."""
    object_store_gib: Annotated[float, Field(ge=0.1, le=4096)] = 1.0
    """Shared memory of a local cluster, GiB."""
    parallel_stages: Annotated[int, Field(ge=1, le=64)] = 1
    """Independent stages at a time, sharing cores or GPUs."""

    @property
    def device(self) -> Device:
        """Device of the models."""
        return "cuda" if self.use_gpu else "cpu"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.address is not None and self.object_store_gib != 1.0:
            raise ValueError(
                "object_store_gib is of a cluster started here: leave it out with an address"
            )
        if self.parallel_stages > 1 and self.use_gpu and not self.workers:
            raise ValueError("stages share no GPU: set workers to 1 or more with parallel_stages")
        if self.strategy == "deepspeed" and self.workers == 0:
            raise ValueError(
                "strategy deepspeed needs workers: set workers to 1 or more, or strategy to ddp"
            )
        return self


class RunRecipe(Model):
    """Fields of every recipe, whichever flow it belongs to."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$", max_length=64)]
    """Names the run, its results and its checkpoints."""
    description: str = ""
    """One sentence or more for lists and pages."""
    seed: Seed = 0
    """Of weights and data order."""
    cluster: ClusterConfig = ClusterConfig()

    def check_batches(self, *trainings: TrainConfig) -> None:
        """Refuse batches that the workers cannot share."""
        if any(config.batch_size % max(1, self.cluster.workers) for config in trainings):
            raise ValueError("cluster.workers must divide every batch_size")


class Recipe(RunRecipe):
    """A whole experiment."""

    kind: Literal["pipeline"] = "pipeline"
    corpus: Annotated[Corpus, Field(discriminator="kind")]
    """Text that rules are mined from and modules trained on."""
    segment_length: Annotated[int, Field(ge=8, le=1 << 20)] = 512
    """Tokens of a row, in mining and in training."""
    mining: MiningConfig = MiningConfig()
    cells: Annotated[tuple[Cell, ...], Field(min_length=1), DIFFERENT]
    distill: DistillConfig
    task: TaskSizes | None = TaskSizes()
    tasks: Annotated[tuple[str, ...], Field(min_length=1), DIFFERENT] = (DEFAULT_TASK,)
    """Tasks scored, of umim_core/task_sets; cells adapt to the first."""
    adapt: AdaptConfig | None = None
    evaluate: EvaluateConfig = EvaluateConfig()
    benchmark: BenchmarkConfig | None = None
    shipped: tuple[str, ...] = ()
    """Trained checkpoints shown as extra rows."""
    headline: HeadlineConfig | None = None
    """A shipped checkpoint of a larger model, shown first where its backbone is to be had."""
    hardware: HardwareConfig | None = None
    """GPUs it is meant for; --dry-run tells whether the training fits."""

    def rule_options(self, cell: Cell) -> RuleOptions:
        """Return how the rules of a cell are made."""
        found = {name: getattr(cell, name) for name in RuleSearch.model_fields}
        shared = {name: getattr(self.mining, name) for name in MiningConfig.model_fields}
        return RuleOptions(**found, **shared, segment_length=self.segment_length)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        adapt, adapted = self.adapt, [cell for cell in self.cells if cell.adapt]
        for cell in self.cells:
            with checking():
                self.rule_options(cell)
        for name, section in {"adapt": adapt, "task": self.task}.items():
            if section is None and adapted:
                raise ValueError(
                    f"a cell asks for adaptation, but the recipe has no '{name}' section"
                )
        if self.cluster.strategy == "deepspeed" and any(cell.rule_rows for cell in self.cells):
            raise ValueError("rule_rows: ZeRO-2 cannot move single rows; take strategy ddp")
        check_row_rate("distill.row_rate", self.distill.row_rate, self.cells)
        if adapt is not None:
            check_row_rate("adapt.sft.row_rate", adapt.sft.row_rate, adapted)
        self.check_batches(self.distill, *([adapt.sft, adapt.dpo] if adapt else []))
        if self.hardware is not None:
            gpus, cluster = self.hardware.gpus, self.cluster
            if not cluster.use_gpu or cluster.workers != gpus:
                raise ValueError(
                    f"hardware has {gpus} GPUs: cluster needs use_gpu true, workers {gpus}"
                )
            strange = set(self.hardware.shapes) - {cell.backbone for cell in self.cells}
            if strange:
                raise ValueError(f"hardware.shapes: no cell has the backbone {min(strange)!r}")
        return self
