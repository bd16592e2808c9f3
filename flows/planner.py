"""Plan of a recipe: its stages, noted instead of run, and bounds on its trainings' memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, TypeVar

from tasks.report.comparison import cell_row
from tasks.run.stage import Artifact, StageCall
from umim_core.backbone.shape import BackboneShape, local_shape
from umim_core.config.recipe import Cell, HardwareConfig, Recipe, RunRecipe
from umim_core.config.recipe_files import AnyRecipe
from umim_core.errors import ConfigError, ResourceLimitError, require
from umim_core.training.step import step_memory
from umim_core.training.train_loop import planned_steps

T = TypeVar("T")
R = TypeVar("R", bound=AnyRecipe)
_GIB: Final = 2.0**30


class Planner(Generic[R]):
    """Stands in for a pipeline run: it notes what would be built, and hands back empty artifacts.

    Artifacts differ: that of the third stage, ``tokenize``, has the path ``3-tokenize``.
    """

    def __init__(self, recipe: R) -> None:
        self.recipe = recipe
        self.steps: list[dict[str, str]] = []
        self._planned: list[tuple[str, dict[str, object], Artifact]] = []

    def stage(self, call: StageCall, *, label: str = "", setting: str = "") -> Artifact:
        name, arguments = call.stage.name, _deciding(call)
        for planned, known, artifact in self._planned:
            if planned == name and known == arguments:  # cells share tokens and counts
                return artifact
        of = f"{label} {setting}".strip()
        self.steps.append({"stage": name, "of": of or self.recipe.name})
        number = str(len(self.steps))
        artifact = Artifact(name, number, Path(f"{number}-{name}"), "", executed=False)
        self._planned.append((name, arguments, artifact))
        return artifact

    def register(self, backbone: str, trained: Artifact) -> None:
        """Register nothing."""

    def run_parallel(
        self, parts: Sequence[Callable[[], T]], *, on_workers: bool = False
    ) -> list[T]:
        """Note the stages of independent parts, one part after the other."""
        return [part() for part in parts]


def _deciding(call: StageCall) -> dict[str, object]:
    """Return the arguments of a stage without what its key leaves out of them and their fields.

    Names decide: what two of them stand for, the same tokenizer for one, is not read for a plan.
    """
    free = call.stage.free

    def counted(name: str, value: object) -> object:
        if not any(path.startswith(f"{name}.") for path in free):
            return value
        named = value if isinstance(value, Mapping) else vars(value)
        return {field: named[field] for field in named if f"{name}.{field}" not in free}

    return {
        name: counted(name, call.arguments[name]) for name in call.arguments if name not in free
    }


@dataclass(frozen=True)
class CellMemory:
    """Steps of a cell's distillation, and the memory at most of one GPU."""

    label: str
    steps: int
    parts: dict[str, float]
    hardware: HardwareConfig

    @property
    def memory_bytes(self) -> float:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.memory_bytes <= self.hardware.gpu_memory_gib * _GIB

    def as_dict(self) -> dict[str, object]:
        return {
            "cell": self.label,
            "steps": self.steps,
            "memory_bytes": self.memory_bytes,
            "memory": self.parts,
            "fits": self.fits,
        }

    def line(self) -> str:
        most, verdict = self.memory_bytes / _GIB, "fits" if self.fits else "may not fit"
        parts = ", ".join(f"{name} {size / _GIB:.2f}" for name, size in self.parts.items())
        return (
            f"distillation of {self.label}, on {self.hardware.gpus} x {self.hardware.name}: steps "
            f"at most {self.steps:,}; memory of a GPU at most {most:.2f} GiB of "
            f"{self.hardware.gpu_memory_gib:g}, {verdict} ({parts})"
        )

    def check(self) -> None:
        most = f"{self.hardware.gpu_memory_gib:.4g} GiB of a GPU"
        rule = f"distillation of {self.label} must take at most {most}"
        found = f"up to {self.memory_bytes / _GIB:.4g} GiB"
        remedy = "Lower distill.micro_batch or distill.batch_size, or use GPUs with more memory."
        require(self.fits, ResourceLimitError, rule, found, remedy)


def memory_of_cells(recipe: RunRecipe) -> list[CellMemory]:
    """Return what each cell's distillation takes of the recipe's GPUs; nothing without hardware."""
    if not isinstance(recipe, Recipe) or recipe.hardware is None:
        return []
    hardware, config, read = recipe.hardware, recipe.distill, recipe.corpus.train_tokens
    steps = config.max_steps
    if read is not None:
        steps = planned_steps(config, read // recipe.segment_length)
    return [
        CellMemory(
            cell_row(cell).label,
            steps,
            step_memory(
                _shape(hardware, cell),
                cell,
                rows=config.batch_size // hardware.gpus,
                segment_length=recipe.segment_length,
                bf16=config.backbone_dtype(recipe.cluster.device) == "bfloat16",
                strategy=recipe.cluster.strategy,
                gpus=hardware.gpus,
                micro_batch=config.micro_batch,
            ),
            hardware,
        )
        for cell in recipe.cells
    ]


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
    rule = f"hardware.shapes must agree with the configuration of {cell.backbone}"
    require(stated in (None, shape), ConfigError, rule, str(stated), f"It is {shape}.")
    return shape
