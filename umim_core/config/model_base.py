"""Base of configuration models, bounded values, and the errors of fields that break a rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Annotated, Any, Final, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
)

from umim_core.errors import ConfigError

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
        rule, value, remedy = first["msg"], first.get("input"), "Correct the field."
        if first["type"] == "extra_forbidden":
            sections, remedy = _sections(model), "Leave it out."
            for field in get_close_matches(str(first["loc"][-1])[:99], sorted(sections), n=1):
                remedy = f"{field!r} is a field of {', '.join(sections[field])}."
        own = getattr(first.get("ctx", {}).get("error"), "__cause__", None)
        if isinstance(own, ConfigError):  # of ``checking``: it says all of this by itself
            rule, remedy = own.rule, own.remedy or remedy
            value = value if own.value is None else own.value
        raise ConfigError(f"{what}: {where}: {rule}", value, remedy) from error


def _models(annotation: Any) -> list[type[BaseModel]]:
    """Return the models in a type, as ``dict[str, A | B]``, without those in their fields."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in _models(inner)]


def _sections(model: type[BaseModel], path: str = "") -> dict[str, list[str]]:
    """Return the sections that have each field, of a model and of those in its fields."""
    found = {name: [path or "the recipe itself"] for name in model.model_fields}
    for name, annotated in model.model_fields.items():
        for inner in _models(annotated.annotation):
            for field, paths in _sections(inner, f"{path}.{name}".removeprefix(".")).items():
                found[field] = list(dict.fromkeys([*found.get(field, []), *paths]))
    return found
