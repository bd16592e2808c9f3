"""The hardware that a recipe is meant for, so that its memory and time can be predicted."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from umim_core.backbone.shape import BackboneShape
from umim_core.config.model_base import Model, PositiveFloat


class HardwareConfig(Model):
    """GPUs of one machine, by their data sheet, and what must be assumed of the run."""

    name: Annotated[str, Field(min_length=1, description="Name of the GPU.")]
    gpus: Annotated[int, Field(ge=1, description="How many; one training worker each.")]
    gpu_memory_gib: Annotated[PositiveFloat, Field(description="Memory of one, GiB.")]
    bf16_tflops: Annotated[
        PositiveFloat, Field(description="Peak of dense bfloat16 products of one, 1e12 FLOP/s.")
    ]
    memory_bandwidth_gbs: Annotated[PositiveFloat, Field(description="Of one GPU, 1e9 bytes/s.")]
    interconnect_gbs: Annotated[
        PositiveFloat, Field(description="Between GPUs, each way, 1e9 bytes/s; PCIe 4.0 x16: 32.")
    ] = 32.0
    expected_token_reduction: Annotated[
        float, Field(ge=0.0, le=0.75, description="Assumed: it is known only after mining.")
    ] = 0.35
    shapes: dict[str, BackboneShape] = Field(
        default_factory=dict, description="Shapes of backbones that may not be on this machine."
    )

    def check(self, *, workers: int, use_gpu: bool, bf16: bool) -> None:
        """Refuse a run that is not one of this hardware.

        Args:
            workers: Training workers.
            use_gpu: Whether they have a GPU each.
            bf16: Whether products are in bfloat16, as ``bf16_tflops`` is.

        Raises:
            ValueError: If the cluster is another; pydantic makes the error of a recipe of it.
        """
        if not use_gpu or workers != self.gpus:
            raise ValueError(
                f"hardware has {self.gpus} GPUs: cluster needs use_gpu true, workers {self.gpus}"
            )
        if not bf16:
            raise ValueError("hardware tells the speed of bfloat16: distill.bf16 must be true")
