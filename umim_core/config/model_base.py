"""Base of configuration models, bounded values, and the errors of fields that break a rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import chain
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


def validated(
    model: type[AnyModel],
    raw: object,
    what: str = "",
    read: Callable[[object], AnyModel] | None = None,
) -> AnyModel:
    """Return a configuration, by what a validator of it is handed, if anything.

    What breaks one of its rules is a ``ConfigError`` of the field, and of ``what`` names all.
    """
    try:
        return (read or model.model_validate)(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where, context = ".".join(str(part)[:99] for part in first["loc"]), first.get("ctx", {})
        said, value, remedy = first["msg"].removeprefix("Value error, "), first["input"], ""
        rule = f"{where}: {said}".removeprefix(": ")
        if first["type"] == "extra_forbidden":
            remedy = _right_name(model, first["loc"])
        elif "ge" in context:
            rule, remedy = f"{where} must be at least {context['ge']}", "Raise it."
        elif "le" in context:
            rule, remedy = f"{where} must be at most {context['le']}", "Lower it."
        elif isinstance(own := getattr(context.get("error"), "__cause__", None), ConfigError):
            # Of ``checking``: it says all of this by itself.
            rule, remedy = f"{where}: {own.rule}".removeprefix(": "), own.remedy
            value = value if own.value is None else own.value
        rule = f"{what}: {rule}".removeprefix(": ")
        raise ConfigError(rule, value, remedy or "Correct it.") from error


def _right_name(model: type[BaseModel], place: Sequence[int | str]) -> str:
    """Return what to write for an unknown field: one of its section, or the section of another."""
    *outer, last = (str(part)[:99] for part in place)
    sections = _sections(model)

    def holds(path: Sequence[str]) -> bool:
        parts = iter(outer)  # kinds of models and places in lists stand between names
        return all(name in parts for name in path)

    if said := did_you_mean(last, sections[max(filter(holds, sections), key=len)]):
        return said
    for field in get_close_matches(last, sorted({*chain(*sections.values())}), n=1):
        places = [".".join(path) for path, fields in sections.items() if field in fields]
        return f"{field!r} is a field of {', '.join(x or 'the recipe itself' for x in places)}."
    return "Leave it out."


def _sections(model: type[BaseModel], *path: str) -> dict[tuple[str, ...], list[str]]:
    """Return the fields of each section, of a model and of those in its fields."""
    found = {path: list(model.model_fields)}
    for name, field in model.model_fields.items():
        for inner in _models(field.annotation):
            for place, fields in _sections(inner, *path, name).items():
                found[place] = [*found.get(place, []), *fields]
    return found


def _models(annotation: Any) -> list[type[BaseModel]]:
    """Return the models in a type, as ``dict[str, A | B]``, without those in their fields."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in _models(inner)]
