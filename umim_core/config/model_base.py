"""Base of configuration models, bounded values, and the errors of fields that break a rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Final, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
)

from umim_core.errors import ConfigError, did_you_mean

T = TypeVar("T")
AnyModel = TypeVar("AnyModel", bound=BaseModel)
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]


def _different(values: tuple[T, ...], info: ValidationInfo) -> tuple[T, ...]:
    if len(set(values)) != len(values):
        raise ValueError(f"{info.field_name} must all be different")
    return values


DIFFERENT: Final = AfterValidator(_different)  # of a list


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
        rule, remedy = f"{where}: {first['msg']}".removeprefix(": "), "Correct the option."
        if "ge" in limits:
            rule, remedy = f"{where} must be at least {limits['ge']}", "Raise it."
        elif "le" in limits:
            rule, remedy = f"{where} must be at most {limits['le']}", "Lower it."
        raise ConfigError(rule, first["input"], remedy) from error


def validated(model: type[AnyModel], raw: object, what: str) -> AnyModel:
    """Return a configuration."""
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part)[:99] for part in first["loc"]) or "the recipe"
        remedy = "Correct the field."
        if first["type"] == "extra_forbidden":
            name, known = str(first["loc"][-1]), _field_names(model)
            remedy = did_you_mean(name, sorted(known)) or "Leave it out."
            if name in known:
                remedy = "It is a field of another section."
        raise ConfigError(f"{what}: {where}: {first['msg']}", first.get("input"), remedy) from error


def _field_names(annotation: Any) -> set[str]:
    """Return the names of all fields of the models in a type, and of those in their fields."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        fields = annotation.model_fields
        return set(fields).union(*(_field_names(field.annotation) for field in fields.values()))
    return set[str]().union(*map(_field_names, get_args(annotation)))
