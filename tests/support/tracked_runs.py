"""A small pipeline as a tracker sees it, and what the tracking store holds of it afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Run

from tasks.tracking.tracker import Tracker

STAGES = ("corpus", "tokenize", "count", "distill")


def record_pipeline(tracker: Tracker, pipeline: str, files: Path) -> None:
    """Record a whole pipeline: stages with live numbers, a checkpoint, a comparison, files."""
    tracker.pipeline_run(pipeline, {"recipe": "tiny", "token": "s3cret"}, name="tiny")
    for folder, name in (("rules/deep", "a.txt"), ("checkpoint", "config.json")):
        (files / folder).mkdir(parents=True, exist_ok=True)
        (files / folder / name).write_text("{}")
    for stage in STAGES:
        tracker.live(pipeline, f"{stage} tiny", {"loss": (1, 0.5), "kl": (1, 0.0)})
        tracker.stage_run(
            pipeline,
            stage,
            f"{pipeline}-{stage}",
            {"steps": 3},
            {"kl": 0.0, "seconds": 1.5},
            [("train_kl", step, 1.0 / step) for step in range(1, 4)],
            artifacts=[files / "rules"] if stage == "count" else [],
            tags={"umim.digest": stage},
        )
    tracker.register_checkpoint(f"model-{pipeline}", files / "checkpoint", f"{pipeline}-distill")
    row, name = {"backbone": "tiny", "tau": 5}, f"{pipeline}-row"
    tracker.comparison_run(pipeline, name, name, row, {"top1": 0.5, "kl": 0.0})
    tracker.attach(pipeline, [files / "checkpoint" / "config.json"])
    tracker.finish(pipeline)


def runs_of(uri: str, kind: str | None = None, query: str = "") -> list[Run]:
    """Return the runs of a store, of one kind or all that a query finds."""
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("umim")
    assert experiment is not None
    wanted = query if kind is None else f"tags.`umim.kind` = '{kind}'"
    return list(client.search_runs([experiment.experiment_id], wanted, max_results=1000))


def held(uri: str) -> dict[str, Any]:
    """Everything in a store by kind and key, without ids and times; a doubled run fails."""
    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    runs = runs_of(uri)
    names = {
        run.info.run_id: f"{run.data.tags['umim.kind']} {run.data.tags['umim.key']}" for run in runs
    }
    found: dict[str, Any] = {}
    for run in runs:
        tags = {
            name: names.get(value, value)
            for name, value in run.data.tags.items()
            if name not in ("umim.root", "mlflow.user", "mlflow.source.name", "mlflow.source.type")
            and not name.startswith("mlflow.source.git")
        }
        points = {
            name: sorted(
                (point.step, point.value)
                for point in client.get_metric_history(run.info.run_id, name)
            )
            for name in run.data.metrics
        }
        name = names[run.info.run_id]
        assert name not in found, "a run is there twice"
        found[name] = {
            "status": run.info.status,
            "name": run.info.run_name,
            "params": run.data.params,
            "points": points,
            "tags": tags,
            "files": sorted(files_of(client, run.info.run_id)),
        }
    versions = client.search_model_versions("name = 'umim'")
    found["versions"] = sorted((names[v.run_id], sorted(v.aliases)) for v in versions)
    return json.loads(json.dumps(found))


def files_of(client: MlflowClient, run_id: str, folder: str | None = None) -> list[str]:
    found: list[str] = []
    for entry in client.list_artifacts(run_id, folder):
        found += files_of(client, run_id, entry.path) if entry.is_dir else [entry.path]
    return found


def of_run(uri: str, pipeline: str) -> dict[str, Any]:
    """Everything that a store holds of a pipeline of five letters, under names for any.

    Points of live numbers are left out: a run that is repeated adds to them.
    """
    found = {name: run for name, run in held(uri).items() if f" {pipeline}" in name}
    for run in found.values():
        run["points"] = {n: p for n, p in run["points"].items() if not n.startswith("live/")}
    renamed: dict[str, Any] = json.loads(json.dumps(found).replace(pipeline, "its-5"))
    return renamed
