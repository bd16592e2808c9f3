"""Sources of a table's questions: where they lie, and what of them belongs into stage keys."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from umim_core.checkpoint.checkpoint_files import read_config, resolve_checkpoint
from umim_core.config.table_recipe import TableRecipe
from umim_core.errors import ConfigError, CorpusError
from umim_core.evaluation.questions import QuestionSource
from umim_core.store.artifacts import directory_digest
from umim_core.task_sets.generation_spec import GENERATION_TASKS, GenerationSet
from umim_core.task_sets.spec import TASKS


def question_source(recipe: TableRecipe, task: str, digests: Mapping[str, str]) -> QuestionSource:
    """Return where a task's questions lie, with paths that a worker in another folder finds."""
    folders = (recipe.hub, recipe.task_data)
    places = [None if at is None else str(Path(at).resolve()) for at in folders]
    own = generation_task(task)
    chosen = task in TASKS.names()  # likelihoods alone
    return QuestionSource(
        task,
        *places,
        digest=" ".join(digests.values()),
        checkpoint=str(resolve_checkpoint(recipe.checkpoint).resolve()),
        backbone=named_backbone(recipe),
        options=() if own is None else tuple(_options(recipe, own).items()),
        new_tokens=None if chosen else recipe.new_tokens,
        answers=None if chosen else recipe.answers,
        seed=recipe.seed,
        confirm_run_unsafe_code=recipe.confirm_run_unsafe_code,
    )


def named_backbone(recipe: TableRecipe) -> str | None:
    """Return the backbone that a recipe names, a file or directory by its absolute path."""
    name = recipe.backbone
    return str(Path(name).resolve()) if name is not None and Path(name).exists() else name


def data_digests(recipe: TableRecipe, task: str) -> dict[str, str]:
    """Return the digests of all that decides a task's questions, by what it is.

    Prompts of a task that the package generates are measured in the backbone's tokens.
    """
    folders = {"hub": recipe.hub, "task_data": recipe.task_data}
    digests = {name: _content(name, Path(at)) for name, at in folders.items() if at is not None}
    if generation_task(task) is None:
        return digests
    config = read_config(resolve_checkpoint(recipe.checkpoint))
    return digests | {
        "backbone": config.backbone_fingerprint,
        "tokenizer": config.tokenizer_fingerprint,
    }


def _content(name: str, folder: Path) -> str:
    if not folder.is_dir():
        raise CorpusError(
            f"{name} of a table must be a folder", str(folder), "Correct it, or leave it out."
        )
    return directory_digest(folder)


def source_facts(recipe: TableRecipe, task: str, digests: Mapping[str, str]) -> dict[str, object]:
    """Return what else decides a task's questions: its specification and limits, as JSON types."""
    if (own := generation_task(task)) is not None:
        specified = {name: value for name, value in vars(own).items() if name != "make"}
        return {"generation": {**own.key(), **specified, "options": _options(recipe, own)}}
    if task in TASKS.names():
        return {} if digests else {"sources": TASKS.find(task).sources()}
    limits = {name: getattr(recipe, name) for name in ("new_tokens", "answers")}
    said = {name: limit for name, limit in limits.items() if limit is not None}
    if recipe.seed:  # of sampled answers
        said["seed"] = recipe.seed
    return {"generation": said} if said else {}


def generation_task(task: str) -> GenerationSet | None:
    """Return the specification of a task that the package generates; None for another task."""
    return GENERATION_TASKS.find(task) if task in GENERATION_TASKS.names() else None


def mined_task(task: str) -> GenerationSet:
    """Return a task whose prompts rules are mined from."""
    if (own := generation_task(task)) is None:
        raise ConfigError(
            f"mine_tau is for generated tasks: {', '.join(GENERATION_TASKS.names())}",
            task,
            "Leave it out, or mine a text: umim mine, and umim train --start CHECKPOINT.",
        )
    return own


def check_data(recipe: TableRecipe) -> None:
    """Refuse data that no task of a table reads, and rules of prompts that are not generated."""
    for task in recipe.tasks:
        if recipe.task_data is not None and task not in TASKS.names():
            raise ConfigError(
                f"task_data is the data of one of {', '.join(TASKS.names())}",
                f"{recipe.task_data} with {task}",
                "Name a folder that stands for the hub (hub), or leave it out.",
            )
        if any(setting.mine_tau is not None for setting in recipe.settings):
            mined_task(task)


def check_limits(recipe: TableRecipe) -> None:
    """Refuse limits and permissions of a recipe that apply to none of its tasks."""
    unknown = any(task not in TASKS.names() for task in recipe.tasks)  # lm-eval knows them
    answers = "a task whose answers are generated"
    programs = any(task not in TASKS.names() and not generation_task(task) for task in recipe.tasks)
    needed = {
        "questions": (bool(recipe.tasks), "a task"),
        "new_tokens": (unknown, answers),
        "answers": (unknown, answers),
        "confirm_run_unsafe_code": (programs, "a task that runs programs of a model"),
    }
    for name, (there, wanted) in needed.items():
        if not there and getattr(recipe, name) not in (None, False):
            raise ConfigError(
                f"{name} is for tables with {wanted}",
                f"{getattr(recipe, name)!r} with {', '.join(recipe.tasks) or 'texts alone'}",
                "Leave it out, or name such a task.",
            )


def _options(recipe: TableRecipe, own: GenerationSet) -> dict[str, int]:
    """Return the options of a task (``TaskOptions``) that the recipe's limits lead to."""
    most = own.max_new_tokens
    limits = {
        "task_questions": recipe.questions,
        "task_new_tokens": None if recipe.new_tokens is None else min(recipe.new_tokens, most),
    }
    stated = {name: limit for name, limit in limits.items() if limit is not None}
    return {"task_seed": recipe.seed, **stated}
