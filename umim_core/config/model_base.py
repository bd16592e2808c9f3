"""Base of configuration models, and bounded numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from umim_core.errors import ConfigError

Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]


class Model(BaseModel):
    """Base of all configuration: frozen, no unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


@contextmanager
def checking() -> Iterator[None]:
    """Let pydantic say where a configuration breaks a rule that is checked within."""
    try:
        yield
    except ConfigError as error:
        raise ValueError(str(error)) from error
