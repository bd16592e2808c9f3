"""Stages ``questions``, ``shards``, ``text`` and ``table``: one table of the paper, measured.

A task under a setting is scored in shards of questions, each a task of the cluster. A finished
shard is a file of the unfinished artifact; a run that was killed finds it and counts it once.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from tasks.cluster.lease import ClusterLease
from tasks.cluster.worker_tasks import run_on_workers
from tasks.data.table_jobs import (
    ModelPlace,
    ShardJob,
    TextJob,
    find_questions,
    measure_text,
    score_shard,
)
from tasks.run.stage import Artifact, Metrics, StageSpec, run_stage
from umim_core.checkpoint.checkpoint_files import read_config, resolve_checkpoint
from umim_core.config.table_recipe import TableRecipe, TableSetting, TableText
from umim_core.errors import EvaluationError, MissingExtraError
from umim_core.evaluation.tasks.shard_values import QuestionSet, QuestionSource, ShardScores
from umim_core.store.artifacts import directory_digest, write_json
from umim_core.task_sets.spec import TASKS
from umim_core.text.files import is_address
from umim_core.text.sources import HubDataset, source_digests

QUESTIONS, SHARDS, TABLE = "questions.json", "shards", "table.json"
Report = dict[str, Any]


def questions_stage(
    root: Path,
    lease: ClusterLease,
    task: str,
    hub: str | None = None,
    task_data: str | None = None,
) -> Artifact:
    """Find out how many questions a task has, which, and the metrics that are means over them."""
    folders = {"hub": hub, "task_data": task_data}
    inputs = {name: directory_digest(Path(at)) for name, at in folders.items() if at is not None}
    source = _source(task, hub, task_data, inputs)
    own = TASKS.find(task) if task in TASKS.names() else None
    config: dict[str, object] = {"task": task, "lm_eval": _lm_eval()}
    if own is not None and not inputs:
        config["sources"] = own.sources()

    def build(out: Path) -> Metrics:
        def keep(_: str, found: QuestionSet) -> None:
            write_json(out / QUESTIONS, asdict(found))

        run_on_workers(lease, find_questions, {task: source}, keep)
        return {"questions": float(_read(out / QUESTIONS)["count"])}

    return run_stage(root, StageSpec("questions", 1, config, inputs), build)


def shards_stage(
    root: Path,
    lease: ClusterLease,
    questions: Artifact,
    recipe: TableRecipe,
    setting: TableSetting,
) -> Artifact:
    """Score a task under a setting: ``shards/<first>-<last>.json`` with a value per question."""
    place = _place(recipe)
    base = setting.merge == "none"
    source = read_config(Path(place.checkpoint)).backbone_fingerprint if base else place.digest
    of = questions.manifest()
    spec = StageSpec(
        "shards",
        2,
        {
            **setting.model_dump(exclude={"name"}),
            "task": of["config"]["task"],  # several tasks ask the same questions
            "lm_eval": of["config"]["lm_eval"],
            "questions": recipe.questions,
            "shard": recipe.shard,
            "batch_size": recipe.batch_size,
            "cores": recipe.cores,
            "device": place.device,
            "dtype": recipe.dtype,
        },
        {"questions": questions.digest, "model": source},
        resumable=True,
    )

    def build(out: Path) -> Metrics:
        body = _read(questions.path / QUESTIONS)
        data = _source(of["config"]["task"], recipe.hub, recipe.task_data, of["inputs"])
        found = QuestionSet(**body | {"metrics": tuple(body["metrics"])})
        count = min(found.count, recipe.questions or found.count)
        jobs = {}
        for first in range(0, count, recipe.shard):
            last = min(first + recipe.shard, count)
            path = out / SHARDS / f"{first:07d}-{last:07d}.json"
            if not path.is_file():
                jobs[path] = ShardJob(place, setting, data, found, first, last)
        run_on_workers(lease, score_shard, jobs, _keep_shard, recipe.cores)
        return _totals(read_shards(out))

    return run_stage(root, spec, build)


def _lm_eval() -> str:
    try:
        return version("lm_eval")
    except PackageNotFoundError as error:
        raise MissingExtraError(
            "task evaluation needs lm-eval", "lm_eval", "pip install 'umim[eval]'"
        ) from error


def _source(
    task: str, hub: str | None, folder: str | None, digests: Mapping[str, str]
) -> QuestionSource:
    """Return where a task's questions lie; a worker stands in another folder."""
    places = [None if at is None else str(Path(at).resolve()) for at in (hub, folder)]
    return QuestionSource(task, *places, digest=" ".join(digests.values()))


def _keep_shard(path: Path, scores: ShardScores) -> None:
    write_json(path, asdict(scores))


def text_stage(root: Path, lease: ClusterLease, recipe: TableRecipe, text: TableText) -> Artifact:
    """Measure alignment and perplexity of one text."""
    place = _place(recipe)
    spec = StageSpec(
        "text",
        1,
        {
            **text.model_dump(exclude={"source"}),
            "source": text.source.model_dump(mode="json", exclude={"paths"}),
            "batch_size": recipe.batch_size,
            "cores": recipe.cores,
            "device": place.device,
            "dtype": recipe.dtype,
        },
        {
            "checkpoint": place.digest,
            **{f"text {n}": digest for n, digest in enumerate(source_digests(text.source))},
        },
    )

    def build(_: Path) -> Metrics:
        kept: Metrics = {}
        jobs = {"text": TextJob(place, _in_place(text))}
        run_on_workers(lease, measure_text, jobs, lambda _, found: kept.update(found), recipe.cores)
        return kept

    return run_stage(root, spec, build)


def _in_place(text: TableText) -> TableText:
    """Return a text whose files are named from the root; a worker stands in another folder."""
    if isinstance(text.source, HubDataset):
        return text
    places = tuple(
        path if is_address(path) else os.path.abspath(path) for path in text.source.paths
    )
    source = text.source.model_copy(update={"paths": places})
    return text.model_copy(update={"source": source})


def table_stage(
    root: Path,
    recipe: TableRecipe,
    scores: Mapping[tuple[str, str], Artifact],
    texts: Mapping[str, Artifact],
) -> Artifact:
    """Put all that was measured into ``table.json``, with paired differences to the first setting.

    Args:
        root: Artifact root.
        recipe: What was measured.
        scores: Artifacts of ``shards`` by task and name of setting.
        texts: Artifacts of ``text`` by name.
    """
    inputs = {f"{task} | {setting}": made.digest for (task, setting), made in scores.items()}
    inputs |= {f"text {name}": made.digest for name, made in texts.items()}
    settings = [setting.name for setting in recipe.settings]
    spec = StageSpec(
        "table",
        1,
        {
            "name": recipe.name,
            "table": recipe.table,
            "checkpoint": str(recipe.checkpoint),
            "settings": settings,
        },
        inputs,
    )

    def build(out: Path) -> Metrics:
        values = {place: read_shards(made.path) for place, made in scores.items()}
        rows = [
            _row(task, setting, values[task, setting], values[task, settings[0]])
            for task, setting in scores
        ]
        measured = [{"text": name, **made.metrics} for name, made in texts.items()]
        body = {"kind": "paper_table", **spec.config, "scores": rows, "texts": measured}
        write_json(out / TABLE, body)
        return {"rows": float(len(rows) + len(measured))}

    return run_stage(root, spec, build)


def read_shards(directory: Path) -> ShardScores:
    """Return the shards of an artifact put together, in the order of the questions."""
    shards = [_read(path) for path in sorted((directory / SHARDS).glob("*.json"))]
    return ShardScores(
        {
            metric: [value for shard in shards for value in shard["values"][metric]]
            for metric in shards[0]["values"]
        },
        *(
            (sum(shard[name][0] for shard in shards), sum(shard[name][1] for shard in shards))
            for name in ("inputs", "contexts")
        ),
        prompts=[prompt for shard in shards for prompt in shard["prompts"]],
    )


def _row(task: str, setting: str, own: ShardScores, base: ShardScores) -> Report:
    if own.prompts != base.prompts:
        raise EvaluationError(
            f"all settings must answer the same questions of {task}, behind the same prompts",
            f"other prompts under {setting}",
            "Use a task whose prompts do not change from one reading to the next.",
        )
    return {
        "task": task,
        "setting": setting,
        "questions": len(next(iter(own.values.values()))),
        "token_reduction": _reduction(own.inputs),
        "context_token_reduction": _reduction(own.contexts),
        **{name: _mean(values) for name, values in own.values.items()},
        **{
            f"{name}_difference": _mean(np.subtract(values, base.values[name]).tolist())
            for name, values in own.values.items()
        },
    }


def _totals(scores: ShardScores) -> Metrics:
    found = {name: _mean(values) for name, values in scores.values.items()}
    errors = {f"{name}_stderr": mean["std"] for name, mean in found.items()}
    return {
        **{name: float(mean["mean"] or 0.0) for name, mean in found.items()},
        **{name: error for name, error in errors.items() if error is not None},
        "questions": float(len(next(iter(scores.values.values())))),
        "token_reduction": _reduction(scores.inputs) or 0.0,
    }


def _mean(values: Sequence[float]) -> dict[str, float | None]:
    """Return the mean and its standard error (``std``; None for a single value)."""
    many = len(values) > 1
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values)) if many else None
    return {"mean": float(np.mean(values)), "std": error}


def _reduction(tally: Sequence[int]) -> float | None:
    raw, units = tally
    return (raw - units) / raw if raw else None


def _place(recipe: TableRecipe) -> ModelPlace:
    directory = resolve_checkpoint(recipe.checkpoint).resolve()
    return ModelPlace(
        str(directory),
        directory_digest(directory),
        recipe.cluster.device,
        recipe.dtype,
        recipe.batch_size,
    )


def _read(path: Path) -> Report:
    found: Report = json.loads(path.read_text(encoding="utf-8"))
    return found
