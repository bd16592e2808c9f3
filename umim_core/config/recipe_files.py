"""Configuration from files and options: read, validated, and refused with a remedy."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from umim_core.errors import ConfigError, did_you_mean

AnyModel = TypeVar("AnyModel", bound=BaseModel)
# Fields that recipes had once, and what to do instead.
_REMOVED: Final = {
    "benchmark.rules": "Leave it out: fixed pairs and the checkpoint's own rules are both timed.",
    "cluster.dashboard": "Start a cluster with its dashboard (ray start --head "
    "--include-dashboard=true) and name its address.",
}


def read_recipe_file(path: Path) -> object:
    """Return what a YAML file holds."""
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(
            "a recipe file must exist", str(path), "`python -m flows recipes` lists the recipes."
        ) from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} must be YAML", str(error), "Correct the file.") from error


def validated(model: type[AnyModel], raw: object, what: str) -> AnyModel:
    """Return a configuration."""
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the recipe"
        remedy = "Correct the field."
        if where in _REMOVED:
            message = f"{what}: {where} is no field any more"
            raise ConfigError(message, first.get("input"), _REMOVED[where]) from error
        if first["type"] == "extra_forbidden":
            known = _fields(model, first["loc"][:-1])
            guess = did_you_mean(str(first["loc"][-1]), known)
            remedy = guess or f"The fields here are {', '.join(known)}."
        raise ConfigError(f"{what}: {where}: {first['msg']}", first.get("input"), remedy) from error


def _fields(model: type[BaseModel], location: Iterable[int | str]) -> list[str]:
    """Return the names of the fields that a model has at a place inside it."""
    models = [model]
    for part in location:
        fields = [m.model_fields[part] for m in models if part in m.model_fields]
        if fields:
            models = [nested for field in fields for nested in _models(field.annotation)]
        elif tagged := [m for m in models if part in _tags(m)]:  # a member of a union
            models = tagged
    return sorted({name for nested in models for name in nested.model_fields})


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models(part)]


def _tags(model: type[BaseModel]) -> tuple[object, ...]:
    kind = model.model_fields.get("kind")
    return () if kind is None else get_args(kind.annotation)
