"""Base of configuration models: bounded numbers, and later fields that defaults leave out.

A dump goes into stage keys, digests and saved files. A field marked ``OMIT_DEFAULT`` is left out of
it where it has its default, so whatever never heard of the field keeps its bytes.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]


class Model(BaseModel):
    """Base of all configuration: frozen, no unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class _Mark(Enum):
    OMIT_DEFAULT = "later"


OMIT_DEFAULT: Final = _Mark.OMIT_DEFAULT
"""Put into a field's annotation: ``depth: Annotated[Depth, OMIT_DEFAULT] = 1``."""


class StableDump(BaseModel):
    """A model whose ``OMIT_DEFAULT`` fields are dumped only where they deviate from it."""

    @model_serializer(mode="wrap")
    def _dump(self, handler: SerializerFunctionWrapHandler) -> dict[str, object]:
        dumped: dict[str, object] = handler(self)
        for name, field in type(self).model_fields.items():
            if OMIT_DEFAULT in field.metadata and getattr(self, name) == field.default:
                dumped.pop(name, None)
        return dumped
