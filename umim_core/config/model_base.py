"""Base of configuration models, bounded values, and the errors of fields that break a rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Annotated, Any, Final, Literal, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from umim_core.errors import ConfigError, field_rule

T = TypeVar("T")
AnyModel = TypeVar("AnyModel", bound=BaseModel)
AtLeast0 = Annotated[int, Field(ge=0)]
AtLeast1 = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
_TOP: Final = "the recipe itself"
_ABSENT: Final = ("missing", "union_tag_not_found")
_REMEDIES: Final = {
    **dict.fromkeys(_ABSENT, "Add it."),
    **dict.fromkeys(("greater_than", "greater_than_equal"), "Raise it."),
    **dict.fromkeys(("less_than", "less_than_equal"), "Lower it."),
}
PositiveFloat = Annotated[float, Field(gt=0.0)]
SEEDS: Final = 2**31  # every generator takes one of so many
Seed = Annotated[int, Field(ge=0, lt=SEEDS)]
Split = Literal["train", "valid", "test"]
SPLITS: Final[tuple[Split, ...]] = ("train", "valid", "test")


def _different(values: tuple[T, ...]) -> tuple[T, ...]:
    if len(set(values)) != len(values):
        raise ValueError("must all be different")
    return values


DIFFERENT: Final = AfterValidator(_different)  # of a list


class Model(BaseModel):
    """Base of all configuration: frozen, no unknown fields; a text below a field describes it."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


@contextmanager
def checking() -> Iterator[None]:
    """Let pydantic say where a configuration breaks a rule that is checked within."""
    try:
        yield
    except ConfigError as error:
        raise ValueError(str(error)) from error


def validated(
    model: type[AnyModel],
    raw: T,
    what: str = "",
    read: Callable[[T], AnyModel] | None = None,
) -> AnyModel:
    """Return a configuration, by what a validator of it is handed, if anything.

    What breaks one of its rules is a ``ConfigError`` of the field, and of ``what`` names all.
    """
    try:
        return (read or model.model_validate)(raw)
    except ValidationError as error:
        first, *others = error.errors(include_url=False)
        if first["type"] == "missing":  # under another name, perhaps
            *outer, name = first["loc"]
            unknown = (one for one in others if one["type"] == "extra_forbidden")
            beside = {
                str(one["loc"][-1])[:99]: one for one in unknown if [*one["loc"][:-1]] == outer
            }
            first = next((beside[x] for x in get_close_matches(str(name), beside)), first)
        where, context = _place(raw, first["loc"]), first.get("ctx", {})
        value, rule = context.get("tag", first["input"]), field_rule(where or what, first)
        remedy = _REMEDIES.get(first["type"], "")
        if first["type"] in _ABSENT:
            value = "nothing"
        elif first["type"] == "extra_forbidden":
            remedy = _right_name(model, first["loc"])
        elif isinstance(own := getattr(context.get("error"), "__cause__", None), ConfigError):
            # Of ``checking``: it says all of this by itself.
            rule, remedy = f"{where or what}: {own.rule}".removeprefix(": "), own.remedy
            value = value if own.value is None else own.value
        elif isinstance(value, dict):  # of a rule over several fields: those that it names
            value = {name: value[name] for name in value if name in first["msg"]} or value
        rule = f"{what}: {rule}" if what and where else rule
        raise ConfigError(rule, value, remedy or "Correct it.") from error


def _place(raw: object, steps: Sequence[int | str]) -> str:
    """Return where in what was given an error lies, without the kinds that pydantic adds."""
    place, is_field = list[str](), False
    for step in steps:
        # a section's kind stands between its name and its fields, one of which may be called so
        is_field = not (is_field and isinstance(raw, dict) and raw.get("kind") == step)
        if not is_field:
            continue
        place.append(str(step)[:99])
        entries = dict(enumerate(raw)) if isinstance(raw, list | tuple) else raw
        raw = entries.get(step) if isinstance(entries, dict) else None
    return ".".join(place)


def _right_name(model: type[BaseModel], place: Sequence[int | str]) -> str:
    """Return what to write for an unknown field: one of its section, or the sections of another."""
    *outer, name = (str(part)[:99] for part in place)
    sections = _sections(model)
    here = ".".join(part for part in outer if part in sections) or _TOP  # no kinds, no places
    like = [name] if name in sections else get_close_matches(name, sorted(sections))
    for field in sorted(like, key=lambda field: here not in sections[field])[:1]:
        if here in sections[field] and field != name:
            return f"Did you mean {field!r}?"
        others = [other for other in sections[field] if other != here]
        return f"{field!r} is a field of {', '.join(others) or f'{here} of another kind'}."
    return "Leave it out."


def _models(annotation: Any) -> list[type[BaseModel]]:
    """Return the models in a type, as ``dict[str, A | B]``, without those in their fields."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in _models(inner)]


def _sections(model: type[BaseModel], path: str = "") -> dict[str, list[str]]:
    """Return the sections that have each field, of a model and of those in its fields."""
    found = {name: [path or _TOP] for name in model.model_fields}
    for name, entry in model.model_fields.items():
        for inner in _models(entry.annotation):
            for field, paths in _sections(inner, f"{path}.{name}".removeprefix(".")).items():
                found[field] = list(dict.fromkeys([*found.get(field, []), *paths]))
    return found
