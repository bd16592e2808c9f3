"""Results of lm-eval's command line as runs of the tracking store.

lm_eval writes ``results_DATE.json`` with ``--output_path DIR``, ``NAME_DATE.json`` with
``--output_path NAME.json``, and a file ``samples_TASK_DATE.jsonl`` per task with ``--log_samples``.
A results file becomes one run, found again by the file's digest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field

from tasks.tracking.tracker import Table, Tracker
from umim_core.config.model_base import validated
from umim_core.errors import ConfigError, EvaluationError
from umim_core.store.artifacts import sha256_file

_DATED: Final = re.compile(r"_(\d{4}-\d\d-\d\dT[\d.\-]+)\.json$")
_NAME_CHARS: Final = 250  # of a run, in MLflow's table of runs
_REMEDY: Final = "Run lm_eval with --output_path DIR --log_samples, then name DIR."
# Besides config: what decides the figures. Task configurations stay in the file.
_DESCRIBED: Final = ("n-shot", "n-samples", "versions", "lm_eval_version", "chat_template_sha")


class _Config(BaseModel):
    model_config = ConfigDict(extra="allow")
    model: str


class _Content(BaseModel):
    """What is read of a results file; a task's name is a part of a file's."""

    model_config = ConfigDict(extra="allow")
    date: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    total_evaluation_time_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    config: _Config
    results: Annotated[
        dict[Annotated[str, Field(pattern=r"^[^/\x00]+$")], dict[str, Any]], Field(min_length=1)
    ]


@dataclass(frozen=True)
class HarnessResults:
    path: Path
    key: str
    content: _Content
    samples: Mapping[str, Path]

    @property
    def name(self) -> str:
        """Name of the run: model and tasks, cut where there are many."""
        name = f"lm-eval {self.content.config.model}: {', '.join(self.content.results)}"
        return name if len(name) <= _NAME_CHARS else f"{name[: _NAME_CHARS - 3]}..."

    def params(self) -> dict[str, object]:
        """Return the settings, ``umim.module_digest`` among them."""
        config, others = self.content.config.model_dump(), self.content.model_extra or {}
        if isinstance(model_args := config.get("model_args"), str):
            # None: "" of a model's defaults.
            parts = [part for part in model_args.split(",") if part]
            config["model_args"] = dict(part.partition("=")[::2] for part in parts)
        return config | {name: others[name] for name in _DESCRIBED if name in others}

    def metrics(self) -> dict[str, float]:
        """Return all figures: ``TASK/acc``, ``TASK/acc_stderr``, ``TASK/exact_match.FILTER``."""
        figures: dict[str, float] = {}
        for task, row in self.content.results.items():
            for field, value in row.items():
                metric, comma, chosen = field.partition(",")
                if comma and isinstance(value, int | float) and not isinstance(value, bool):
                    ending = "" if chosen == "none" else f".{chosen}"
                    figures[f"{task}/{metric}{ending}"] = float(value)
        return figures

    def table(self, task: str) -> Table:
        """Return the logged samples of a task by column, nested values as JSON.

        ``prompt`` is the text of a question's first request, ``arguments`` holds all of them.
        """
        path, rows = self.samples[task], []
        with path.open(encoding="utf-8", errors="surrogateescape") as file:
            for number, line in enumerate(file, 1):
                try:
                    sample = json.loads(line)
                    prompt = sample["arguments"]["gen_args_0"]["arg_0"]
                    row = {"doc_id": sample["doc_id"], "prompt": prompt, **sample}
                    for name, value in row.items():
                        if isinstance(value, dict | list):
                            row[name] = json.dumps(value, ensure_ascii=False)
                    json.dumps(row, ensure_ascii=False).encode()
                except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
                    raise EvaluationError(
                        "a line of logged samples must be a question as lm-eval writes it",
                        f"{path}, line {number}: {type(error).__name__}: {error}",
                        "Run lm_eval again.",
                    ) from error
                rows.append(row)
        columns = dict.fromkeys(name for row in rows for name in row)
        return {name: [row.get(name) for row in rows] for name in columns}


def find_results(path: Path) -> list[HarnessResults]:
    """Read a results file, or all that lm_eval wrote to an ``--output_path``, oldest first."""
    named = path.suffix == ".json" and not path.is_dir()
    candidates = path.parent.glob(f"{path.stem}_*.json") if named else path.rglob("*.json")
    paths = [path] if path.is_file() else sorted(filter(_date, candidates), key=_date)
    if not paths:
        raise EvaluationError("a folder must hold results of lm-eval", path, _REMEDY)
    return [_read(results) for results in paths]


def log_results(tracker: Tracker, results: HarnessResults) -> dict[str, object]:
    """Write settings, figures, samples and the file itself as one run; a finished one stays.

    Returns:
        Ids of run and experiment, and whether the run is new.
    """
    tables = {f"samples/{task}.json": results.table(task) for task in results.samples}
    began = int(1000 * results.content.date)
    took = int(1000 * (results.content.total_evaluation_time_seconds or 0))

    with tracker.session(), tracker.alone(results.key):
        before = tracker.find("harness", results.key)
        new = before is None or before.info.status != "FINISHED"
        if before is not None and new:  # killed: MLflow would add its tables' rows once more
            tracker.client.delete_run(before.info.run_id)
        run = tracker.record(
            "harness",
            results.key,
            results.name,
            results.params(),
            [(name, 0, value) for name, value in results.metrics().items()],
            {},
            time_ms=began,
            end_ms=began + took,
            tables=tables,
            files=[results.path],
        )
        return {"run_id": run.info.run_id, "experiment_id": tracker.experiment_id, "new": new}


def _read(path: Path) -> HarnessResults:
    date = _date(path)
    try:
        content = validated(_Content, path.read_bytes(), read=_Content.model_validate_json)
        files = {task: path.with_name(f"samples_{task}_{date}.jsonl") for task in content.results}
        samples = {task: file for task, file in files.items() if date and file.is_file()}
    except (ConfigError, OSError) as error:
        found = error.rule if isinstance(error, ConfigError) else error
        rule = "a results file must be as lm-eval writes it"
        raise EvaluationError(rule, f"{path}: {found}", _REMEDY) from error
    return HarnessResults(path, sha256_file(path), content, samples)


def _date(path: Path) -> str:
    """Return the date in the name of a results file, which its samples share; empty for none."""
    match = _DATED.search(path.name)
    return match[1] if match else ""
