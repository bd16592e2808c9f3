"""Base of configuration models, numbers with bounds, and policies by name."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
LossKernel = Literal["eager", "compiled"]  # how the elementwise part of the loss runs


class Model(BaseModel):
    """Base of all configuration: frozen, no unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
