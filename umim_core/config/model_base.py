"""Base of configuration models, and bounded numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from umim_core.errors import ConfigError

AnyModel = TypeVar("AnyModel", bound=BaseModel)
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


def typed(read: Callable[[object], AnyModel], raw: object) -> AnyModel:
    """Read options that a caller gives by themselves, not in a file that names the place."""
    try:
        return read(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where, limits = ".".join(map(str, first["loc"])), first.get("ctx", {})
        if first["type"] == "value_error":
            raise ConfigError(first["msg"].removeprefix("Value error, ")) from error
        for limit, words, remedy in (
            ("ge", "at least", "Raise it."),
            ("le", "at most", "Lower it."),
        ):
            if limit in limits:
                rule = f"{where} must be {words} {limits[limit]}"
                raise ConfigError(rule, first["input"], remedy) from error
        rule = f"{where}: {first['msg']}".removeprefix(": ")
        raise ConfigError(rule, first["input"], "Correct the option.") from error
