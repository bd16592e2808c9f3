"""The hardware that a recipe is meant for, so that it is known whether a training fits."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from umim_core.backbone.shape import BackboneShape
from umim_core.config.model_base import Model, PositiveFloat


class HardwareConfig(Model):
    """GPUs of one machine, and the shapes of the backbones that are trained on them."""

    name: Annotated[str, Field(min_length=1, description="Name of the GPU.")]
    gpus: Annotated[int, Field(ge=1, description="How many; one training worker each.")]
    gpu_memory_gib: Annotated[PositiveFloat, Field(description="Memory of one, GiB.")]
    shapes: dict[str, BackboneShape] = Field(
        default_factory=dict, description="Shapes of backbones that may not be on this machine."
    )

    def check(self, *, workers: int, use_gpu: bool) -> None:
        """Refuse a run that is not one of this hardware.

        Raises:
            ValueError: If the cluster is another; pydantic makes the error of a recipe of it.
        """
        if not use_gpu or workers != self.gpus:
            raise ValueError(
                f"hardware has {self.gpus} GPUs: cluster needs use_gpu true, workers {self.gpus}"
            )
