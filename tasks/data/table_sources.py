"""Sources of a table's questions: where they lie, and what of them belongs into stage keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Final

from umim_core.checkpoint.checkpoint_files import read_config, resolve_checkpoint
from umim_core.config.table_recipe import TableRecipe
from umim_core.errors import ConfigError, CorpusError
from umim_core.evaluation.tasks.shard_values import AnswerOptions, QuestionSource
from umim_core.evaluation.text_metrics.text_metric import TEXT_METRICS
from umim_core.store.artifacts import directory_digest, sha256_file
from umim_core.task_sets.generation_spec import GENERATION_TASKS, GenerationSet
from umim_core.task_sets.spec import TASKS
from umim_core.task_sets.task_files import DataFile, HubTable, read_rows, refuse_data_variable
from umim_core.text.sources import HubDataset, source_digests

HUB_COMMIT: Final = "hub_commit"  # among the inputs of a task's questions


def question_source(recipe: TableRecipe, task: str, digests: Mapping[str, str]) -> QuestionSource:
    """Return where a task's questions lie, with paths that a worker in another folder finds.

    Args:
        recipe: The table.
        task: Name of the task.
        digests: What :func:`data_digests` returned for it.
    """
    folders = (recipe.hub, recipe.task_data)
    places = [None if at is None else str(Path(at).resolve()) for at in folders]
    own = generation_task(task)
    table = hub_table(recipe, task)
    here = table is None or Path(table.path).is_dir()
    commit = None if here else digests.get(HUB_COMMIT)
    answers = None if own is None else _answers(recipe, own, commit)
    return QuestionSource(task, *places, digest=" ".join(digests.values()), answers=answers)


def data_digests(recipe: TableRecipe, task: str) -> dict[str, str]:
    """Return the digests of all that decides a task's questions, by what it is.

    Prompts of a task whose answers are generated are measured in the backbone's tokens.

    Raises:
        CorpusError: If a folder that the recipe names is missing, its data files lack the task's,
            or the hub cannot be asked for its table's commit and the recipe names no revision.
    """
    folders = {"hub": recipe.hub, "task_data": recipe.task_data}
    digests = {name: _content(name, Path(at)) for name, at in folders.items() if at is not None}
    own = generation_task(task)
    if own is None:
        return digests
    if (table := hub_table(recipe, task)) is not None:
        asked = HubDataset(name=table.path, config=table.name, revision=recipe.revisions.get(task))
        (digests[HUB_COMMIT],) = source_digests(asked)
    if recipe.data_files is not None and isinstance(own.source, DataFile):
        folder = Path(recipe.data_files)
        next(read_rows(own.source, folder), None)  # refuses a file that is missing
        digests["data_files"] = sha256_file(folder / own.source.path)
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
    """Return what else decides a task's questions: its specification and options, as JSON types."""
    if (own := generation_task(task)) is not None:
        specified = {name: value for name, value in vars(own).items() if name != "source"}
        facts: dict[str, object] = {
            "generation": {**own.key(), **specified, "options": _options(recipe, own)}
        }
        from_hub = isinstance(own.source, DataFile) and recipe.data_files is None
        return {**facts, "sources": asdict(own.source)} if from_hub else facts
    known = TASKS.find(task) if task in TASKS.names() else None
    return {} if known is None or digests else {"sources": known.sources()}


def hub_table(recipe: TableRecipe, task: str) -> HubTable | None:
    """Return the hub's table that a task's questions are read from; None for another source."""
    own = generation_task(task)
    if own is None or recipe.data_files is not None or recipe.hub is not None:
        return None
    return own.source.hub if isinstance(own.source, DataFile) else None


def generation_task(task: str) -> GenerationSet | None:
    """Return the specification of a task whose answers are generated; None for another task."""
    return GENERATION_TASKS.find(task) if task in GENERATION_TASKS.names() else None


def check_data(recipe: TableRecipe) -> None:
    """Refuse data that no task of a table reads, that no stage key holds, or that are missing.

    Raises:
        ConfigError: If ``UMIM_TASK_DATA`` is set without ``task_data``, a task whose answers are
            generated has ``task_data``, it needs ``data_files`` and there are none, or a revision
            is of no data set that is read.
    """
    if recipe.task_data is None:  # which wins over the variable
        refuse_data_variable()
    for task in recipe.revisions:
        if task not in recipe.tasks or hub_table(recipe, task) is None:
            raise ConfigError(
                "revisions are of tasks of the table whose questions come from the hub's own table",
                task,
                "Leave it out; the content of folders and files is in the keys as it is.",
            )
    for task in recipe.tasks:
        own = generation_task(task)
        if own is None:
            continue
        if recipe.task_data is not None:
            raise ConfigError(
                f"task_data is the data of a choice task, and {task} generates its answers",
                recipe.task_data,
                "Name the folder as data_files.",
            )
        source = own.source
        if recipe.data_files is None and isinstance(source, DataFile) and source.hub is None:
            raise ConfigError(
                f"a table of {task} must name a folder of data_files with {source.path}",
                recipe.data_files,
                f"Put {source.origin} there; no data set of the hub has its form.",
            )


def check_limits(recipe: TableRecipe) -> None:
    """Refuse limits and permissions of a recipe that apply to none of its tasks.

    Raises:
        ConfigError: If there is one; it would be ignored.
    """
    generated = [own for own in map(generation_task, recipe.tasks) if own is not None]
    programs = any(TEXT_METRICS.find(name).runs_code for own in generated for name in own.metrics)
    files = any(isinstance(own.source, DataFile) for own in generated)
    cut = any(own.cut is not None for own in generated)
    answers = "a task whose answers are generated"
    needed = {
        "questions": (bool(recipe.tasks), "a task"),
        "new_tokens": (bool(generated), answers),
        "answers": (bool(generated), answers),
        "data_files": (files, f"{answers} and whose questions are a file"),
        "length": (cut, "a task that may cut a text"),
        "confirm_run_unsafe_code": (programs, "a task that runs programs of a model"),
    }
    for name, (there, wanted) in needed.items():
        if not there and getattr(recipe, name) not in (None, False):
            raise ConfigError(
                f"{name} is for tables with {wanted}",
                f"{getattr(recipe, name)!r} with {', '.join(recipe.tasks) or 'texts alone'}",
                "Leave it out, or name such a task.",
            )


def refuse_programs(recipe: TableRecipe, task: str) -> None:
    """Refuse a task that runs what a model wrote, where nobody has confirmed it.

    Raises:
        ConfigError: If it does and the recipe lacks ``confirm_run_unsafe_code``.
    """
    own = generation_task(task)
    if own is None or recipe.confirm_run_unsafe_code:
        return
    if any(TEXT_METRICS.find(name).runs_code for name in own.metrics):
        raise ConfigError(
            f"a table that runs programs of a model ({task}) needs a confirmation",
            "none",
            "Add --confirm-run-unsafe-code; each program runs confined, in a process of its own.",
        )


def _answers(recipe: TableRecipe, own: GenerationSet, commit: str | None) -> AnswerOptions:
    options: dict[str, int | str] = dict(_options(recipe, own))
    if commit is not None:
        options["task_revision"] = commit
    if recipe.data_files is not None:
        options["task_data"] = str(Path(recipe.data_files).resolve())
    return AnswerOptions(
        str(resolve_checkpoint(recipe.checkpoint).resolve()),
        tuple(options.items()),
        recipe.seed,
        recipe.confirm_run_unsafe_code,
    )


def _options(recipe: TableRecipe, own: GenerationSet) -> dict[str, int]:
    """Return the options of a task (``TaskOptions``) that the recipe's limits lead to."""
    limits = {
        "task_questions": recipe.questions,
        "task_length": recipe.length,
        "task_new_tokens": _lower(recipe.new_tokens, own.max_new_tokens),
        "task_repeats": _lower(recipe.answers, own.repeats),
    }
    limited = {name: limit for name, limit in limits.items() if limit is not None}
    return {"task_seed": recipe.seed, **limited}


def _lower(limit: int | None, own: int) -> int | None:
    return None if limit is None else min(limit, own)
