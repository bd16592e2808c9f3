"""Runs of lm-eval's tasks within a process: no global seed is set, no environment is collected."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, cast

from datasets import config as datasets_config
from lm_eval import evaluator
from lm_eval.api.model import LM
from lm_eval.api.task import Task
from lm_eval.defaults import DEFAULT_OTHER_SEED
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from umim_core.errors import ConfigError, did_you_mean
from umim_core.evaluation.tasks.spec_task import lm_eval_config
from umim_core.task_sets.spec import TASKS

Metrics = dict[str, Any]
Samples = list[dict[str, Any]]


@cache
def _shipped() -> TaskManager:
    """Return the index of lm-eval's own tasks; it takes seconds to build."""
    return TaskManager(metadata={})


def own_config(name: str) -> dict[str, Any] | None:
    """Return the configuration of a task that a YAML file of this package names; None without."""
    path = Path(__file__).parent / f"{name}.yaml"
    return load_yaml(path) if name.isidentifier() and path.is_file() else None


def knows_task(name: str) -> bool:
    """Return whether this package or lm-eval has a task of this name; tags and groups are none."""
    return own_config(name) is not None or name in _shipped().all_subtasks


def _config(name: str) -> str | dict[str, Any]:
    """Return what lm-eval loads a task by: a configuration, or the name of one of its own."""
    if name in TASKS.names():
        return lm_eval_config(TASKS.find(name))
    if not knows_task(name):
        raise ConfigError(
            f"a task must be one of {', '.join(TASKS.names())}, or one that lm-eval ships",
            name,
            did_you_mean(name, TASKS.names()) or "`lm-eval ls subtasks` lists lm-eval's.",
        )
    return own_config(name) or name


def runs_programs(name: str) -> bool:
    """Return whether lm-eval's task of this name runs programs that a model wrote."""
    entry = _shipped().task_index.get(name)
    if entry is None or entry.yaml_path is None:
        return False
    return bool(load_yaml(entry.yaml_path, resolve_func=False).get("unsafe_code"))


def load_tasks(
    tasks: Sequence[str | dict[str, object]], options: dict[str, Any] | None = None
) -> dict[str, Task]:
    """Load tasks and their data.

    Returns:
        The tasks by name, with the examples in the prompt that they ask for, else none.

    Raises:
        ConfigError: If there is no task of a name.
    """
    wanted = [_config(task) if isinstance(task, str) else task for task in tasks]
    named = any(isinstance(task, str) for task in wanted)
    manager = (
        _shipped()
        if named and not options
        else TaskManager(include_defaults=named, metadata=options or {})
    )
    loaded = manager.load(wanted)
    for task in loaded["tasks"].values():
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)  # as lm-eval's own command
    return cast("dict[str, Task]", loaded["tasks"])


def run_task(model: LM, task: Task, limit: int | None) -> tuple[Metrics, Samples]:
    """Run one task.

    Args:
        model: The model.
        task: One of :func:`load_tasks`.
        limit: First questions of the task; None for all.

    Returns:
        lm-eval's metrics, and its logged samples.
    """
    name = task.task_name
    loaded = {"tasks": {name: task}, "groups": {}, "group_map": {}}
    results = evaluator.evaluate(lm=model, task_dict=loaded, limit=limit, bootstrap_iters=0)
    return results["results"][name], results["samples"][name]


@contextmanager
def standing_for_the_hub(hub: str | None, digest: str) -> Iterator[None]:
    """Let a folder stand for the hub while tasks load their data.

    Args:
        hub: The folder; None asks the hub, or its cache.
        digest: Of the folder's content; each content has a cache of its own.
    """
    if hub is None:
        yield
        return
    before = datasets_config.HF_DATASETS_CACHE
    datasets_config.HF_DATASETS_CACHE = Path(before) / f"umim-{digest[:16]}"
    try:
        with chdir(hub):  # copies are found by paths that equal the hub's names
            yield
    finally:
        datasets_config.HF_DATASETS_CACHE = before
