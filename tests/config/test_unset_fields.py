from __future__ import annotations

from collections.abc import Iterator
from inspect import get_annotations
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from umim_core.config.any_recipe import load_any_recipe
from umim_core.config.recipe import Recipe

RECIPES = Path(__file__).resolve().parents[2] / "infra" / "recipes"
# Reason -> fields that no shipped recipe sets. A field without one is removed.
STAYS = {
    "refuses a run before it costs too much": """
        MiningConfig.max_memory_gib TrainConfig.max_skipped_steps HubDataset.max_bad
        JsonLines.max_bad ParquetFiles.max_bad JsonLines.nul ClusterConfig.max_restarts""",
    "fits a run to a machine; no result depends on it": """
        ClusterConfig.address ClusterConfig.cpus ClusterConfig.object_store_gib
        PreferenceConfig.micro_batch
        MiningConfig.block_tokens
        GeneratedCorpus.shard_questions""",
    "names text of the user's own": """
        DocstringCorpus.packages DocstringCorpus.out_of_domain FilesCorpus.out_of_domain
        GeneratedCorpus.out_of_domain GeneratedCorpus.train_tokens
        MixtureCorpus.train_tokens MixtureCorpus.seed MixtureCorpus.max_characters
        JsonLines.field ParquetFiles.paths ParquetFiles.field TokenIds.path""",
    "asks a model in a way that the paper's recipe does not need": """
        GeneratedCorpus.template GeneratedCorpus.chat GeneratedCorpus.revision
        GeneratedCorpus.seed""",
    "guards what becomes a rule": """
        MiningConfig.min_documents RulesConfig.rule_budget CellRules.rules""",
    "a policy of the paper or its alternative, which an ablation may take": """
        AdaptConfig.settings""",
    "other methods and tasks to compare on, which cost a measurement each": """
        Recipe.tasks""",
}


def models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for part in get_args(annotation) for found in models(part)]


def all_models(model: type[BaseModel], seen: set[type[BaseModel]]) -> set[type[BaseModel]]:
    if model not in seen:
        seen.add(model)
        for field in model.model_fields.values():
            for inner in models(field.annotation):
                all_models(inner, seen)
    return seen


def owner(model: type[BaseModel], name: str) -> str:
    """The class that declares a field, the oldest one: a field of a base is one field."""
    declaring = [base for base in model.__mro__ if name in get_annotations(base)]
    return f"{declaring[-1].__name__}.{name}"


def set_fields(value: object) -> Iterator[str]:
    """Fields that are set in a validated recipe, at any depth."""
    if isinstance(value, BaseModel):
        for name in value.model_fields_set:
            yield owner(type(value), name)
            yield from set_fields(getattr(value, name))
    elif isinstance(value, dict):
        for part in value.values():
            yield from set_fields(part)
    elif isinstance(value, tuple):
        for part in value:
            yield from set_fields(part)


def test_every_field_is_set_by_a_recipe_or_stays_for_a_reason() -> None:
    known: set[type[BaseModel]] = set()
    all_models(Recipe, known)
    fields = {owner(m, name) for m in known for name in m.model_fields if name != "kind"}
    used = {name for path in RECIPES.glob("*.yaml") for name in set_fields(load_any_recipe(path))}
    unset = fields - used
    listed = " ".join(STAYS.values()).split()
    assert len(listed) == len(set(listed))
    assert unset == set(listed), (
        f"set by no recipe and not listed: {sorted(unset - set(listed))}; "
        f"listed, but set or gone: {sorted(set(listed) - unset)}"
    )
