"""Sources of a table's questions: where they lie, what decides them, and what fits a table."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tasks.run.stage import Digest
from umim_core.checkpoint.checkpoint_files import read_config, resolve_checkpoint
from umim_core.config.table_recipe import TableRecipe
from umim_core.errors import ConfigError, CorpusError, MissingExtraError
from umim_core.evaluation.questions import QuestionSource
from umim_core.store.artifacts import directory_digest
from umim_core.task_sets.generation_spec import GENERATION_TASKS, GenerationSet
from umim_core.task_sets.spec import TASKS


@dataclass(frozen=True)
class TableQuestions:
    """One task of a table: where its questions lie, and what decides them."""

    recipe: TableRecipe
    task: str

    @cached_property
    def digests(self) -> dict[str, str]:
        """Of all files that decide the questions, by what they are.

        Prompts of a task that the package generates are measured in the backbone's tokens.
        """
        folders = {"hub": self.recipe.hub, "task_data": self.recipe.task_data}
        digests = {name: _content(name, Path(at)) for name, at in folders.items() if at is not None}
        if self.generated is None:
            return digests
        config = read_config(resolve_checkpoint(self.recipe.checkpoint))
        return digests | {
            "backbone": config.backbone_fingerprint,
            "tokenizer": config.tokenizer_fingerprint,
        }

    @property
    def generated(self) -> GenerationSet | None:
        """The specification of a task that the package generates; None for another task."""
        return GENERATION_TASKS.find(self.task) if self.task in GENERATION_TASKS.names() else None

    @property
    def chosen(self) -> bool:
        """Whether likelihoods of given answers are scored, and nothing is generated."""
        return self.task in TASKS.names()

    def identity(self) -> dict[str, object]:
        """Return specification, limits, and the digests of what is read."""
        recipe, digests = self.recipe, {n: Digest(known) for n, known in self.digests.items()}
        parts: dict[str, object] = {"task": self.task, "lm_eval": _lm_eval(), **digests}
        if (own := self.generated) is not None:
            specified = {name: value for name, value in vars(own).items() if name != "make"}
            return {**parts, **own.key(), **specified, "options": _options(recipe, own)}
        if self.chosen:
            return parts if digests else {**parts, "sources": TASKS.find(self.task).sources()}
        return {**parts, "new_tokens": recipe.new_tokens, "answers": recipe.answers,
                "seed": recipe.seed}  # fmt: skip

    def source(self) -> QuestionSource:
        """Return where they lie, with paths that a worker in another folder finds."""
        recipe, own = self.recipe, self.generated
        folders = (recipe.hub, recipe.task_data)
        places = [None if at is None else str(Path(at).resolve()) for at in folders]
        return QuestionSource(
            self.task,
            *places,
            digest=" ".join(self.digests.values()),
            checkpoint=str(resolve_checkpoint(recipe.checkpoint).resolve()),
            backbone=named_backbone(recipe),
            options=() if own is None else tuple(_options(recipe, own).items()),
            new_tokens=None if self.chosen else recipe.new_tokens,
            answers=None if self.chosen else recipe.answers,
            seed=recipe.seed,
            confirm_run_unsafe_code=recipe.confirm_run_unsafe_code,
        )


def _lm_eval() -> str:
    try:
        return version("lm_eval")
    except PackageNotFoundError as error:
        raise MissingExtraError(
            "task evaluation needs lm-eval", "lm_eval", "pip install 'umim[eval]'"
        ) from error


def named_backbone(recipe: TableRecipe) -> str | None:
    """Return the backbone that a recipe names, a file or directory by its absolute path."""
    name = recipe.backbone
    return str(Path(name).resolve()) if name is not None and Path(name).exists() else name


def _content(name: str, folder: Path) -> str:
    if not folder.is_dir():
        raise CorpusError(
            f"{name} of a table must be a folder", str(folder), "Correct it, or leave it out."
        )
    return directory_digest(folder)


def mined_task(task: str) -> GenerationSet:
    """Return a task whose prompts rules are mined from."""
    if task not in GENERATION_TASKS.names():
        raise ConfigError(
            f"mine_tau is for generated tasks: {', '.join(GENERATION_TASKS.names())}",
            task,
            "Leave it out, or mine a text: umim mine, and umim train --start CHECKPOINT.",
        )
    return GENERATION_TASKS.find(task)


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
    programs = bool(set(recipe.tasks) - {*TASKS.names(), *GENERATION_TASKS.names()})
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
