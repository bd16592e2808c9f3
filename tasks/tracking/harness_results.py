"""Results of lm-eval's command line as runs of the tracking store.

lm_eval writes ``results_DATE.json`` with ``--output_path DIR``, ``NAME_DATE.json`` with
``--output_path NAME.json``, and a file ``samples_TASK_DATE.jsonl`` per task with ``--log_samples``.
A results file becomes one run, found again by the file's digest.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tasks.tracking.mlflow_store import CREATION_SECONDS, UPLOAD_SECONDS, Owner, Store
from tasks.tracking.tracking_values import StoredRun, fit_name, flatten
from umim_core.errors import EvaluationError, require
from umim_core.store.artifacts import sha256_file

_DATED: Final = re.compile(r"_(\d{4}-\d\d-\d\dT[\d.\-]+)\.json$")
_NAME_CHARS: Final = 250  # of a run, in MLflow's table of runs
_CONNECT_SECONDS: Final = 10
_TASK_BYTES: Final = 200  # with the rest of the name of its samples' file 255
_REMEDY: Final = "Run lm_eval with --output_path DIR --log_samples, then name DIR."
# Besides config: what decides the figures. Task configurations stay in the file.
_DESCRIBED: Final = ("n-shot", "n-samples", "versions", "lm_eval_version", "chat_template_sha")


@dataclass(frozen=True)
class HarnessResults:
    """A results file of lm-eval."""

    path: Path
    key: str
    content: Mapping[str, Any]
    samples: Mapping[str, Path]

    @property
    def name(self) -> str:
        """Name of the run: model and tasks, cut where there are many."""
        name = f"lm-eval {self.content['config']['model']}: {', '.join(self.content['results'])}"
        return name if len(name) <= _NAME_CHARS else f"{name[: _NAME_CHARS - 3]}..."

    def params(self) -> dict[str, str]:
        """Return the settings by dotted name, ``umim.module_digest`` among them."""
        config = dict(self.content["config"])
        if isinstance(model_args := config.get("model_args"), str):
            # None: "" of a model's defaults.
            parts = [part for part in model_args.split(",") if part]
            config["model_args"] = dict(part.partition("=")[::2] for part in parts)
        described = {name: self.content[name] for name in _DESCRIBED if name in self.content}
        return flatten({**config, **described})

    def metrics(self) -> dict[str, float]:
        """Return all figures: ``TASK/acc``, ``TASK/acc_stderr``, ``TASK/exact_match.FILTER``."""
        figures: dict[str, float] = {}
        for task, row in self.content["results"].items():
            for field, value in row.items():
                metric, comma, chosen = field.partition(",")
                if comma and isinstance(value, int | float) and not isinstance(value, bool):
                    ending = "" if chosen == "none" else f".{chosen}"
                    figures[fit_name(f"{task}/{metric}{ending}")] = float(value)
        return figures

    def table(self, task: str) -> dict[str, list[object]]:
        """Return the logged samples of a task by column, nested values as JSON.

        ``prompt`` is the text of a question's first request, ``arguments`` holds all of them.
        """
        path, rows = self.samples[task], []
        with path.open(encoding="utf-8", errors="surrogateescape") as file:
            for number, line in enumerate(file, 1):
                try:
                    rows.append(_flat_sample(json.loads(line)))
                    json.dumps(rows[-1], ensure_ascii=False).encode()
                except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
                    raise EvaluationError(
                        "a line of logged samples must be a question as lm-eval writes it",
                        f"{path}, line {number}: {type(error).__name__}: {error}",
                        "Run lm_eval again.",
                    ) from error
        columns = dict.fromkeys(name for row in rows for name in row)
        return {name: [row.get(name) for row in rows] for name in columns}


@dataclass(frozen=True)
class LoggedResults:
    """Run of a results file: its id, its experiment's, and whether it is new."""

    run_id: str
    experiment_id: str
    new: bool


def find_results(path: Path) -> list[HarnessResults]:
    """Read a results file, or all that lm_eval wrote to an ``--output_path``, oldest first."""
    named = path.suffix == ".json" and not path.is_dir()
    candidates = path.parent.glob(f"{path.stem}_*.json") if named else path.rglob("*.json")
    paths = [path] if path.is_file() else sorted(filter(_date, candidates), key=_date)
    if not paths:
        raise EvaluationError("a folder must hold results of lm-eval", path, _REMEDY)
    return [_read(results) for results in paths]


def log_results(store: Store, results: HarnessResults, owner: Owner) -> LoggedResults:
    """Write settings, figures, samples and the file itself as one run; a finished one stays."""
    tables = {task: results.table(task) for task in results.samples}
    time_ms = int(1000 * float(results.content["date"]))
    with store.session(CREATION_SECONDS, _CONNECT_SECONDS, UPLOAD_SECONDS):
        run = store.ensure("harness", results.key, results.name, owner, time_ms=time_ms)
        if new := run.status != "FINISHED":
            _write(store, run, results, tables)
        return LoggedResults(run.run_id, store.experiment_id, new)


def _write(
    store: Store,
    run: StoredRun,
    results: HarnessResults,
    tables: Mapping[str, Mapping[str, Sequence[object]]],
) -> None:
    points = [(name, 0, value) for name, value in results.metrics().items()]
    store.log(run.run_id, results.params(), points, time_ms=run.start_time_ms)
    for task, columns in tables.items():
        store.log_table(run.run_id, columns, f"samples/{task}.json")
    store.log_files(run.run_id, [results.path])
    seconds = float(results.content.get("total_evaluation_time_seconds") or 0)
    store.set_status(run.run_id, "FINISHED", run.start_time_ms + int(1000 * seconds))


def _read(path: Path) -> HarnessResults:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        results, known = content["results"], content["config"]["model"]
        began, took = content["date"], content.get("total_evaluation_time_seconds")
        timed = 0 < float(began) < math.inf and 0 <= float(took or 0) < math.inf
        rows = bool(results) and all(isinstance(row, dict) for row in results.values())
        complete = timed and rows and isinstance(known, str)
        json.dumps(content, ensure_ascii=False).encode()  # a lone surrogate is refused here
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
        raise EvaluationError(
            "a results file must be as lm-eval writes it",
            f"{path}: {type(error).__name__}: {error}",
            _REMEDY,
        ) from error
    if not complete:
        raise EvaluationError("a results file must name a model and its tasks", path, _REMEDY)
    for task in results:
        require(
            "/" not in task and "\0" not in task and 0 < len(task.encode()) <= _TASK_BYTES,
            EvaluationError,
            f"{path.name}: a task's name must be one that a file can bear",
            repr(task),
            _REMEDY,
        )
    samples: dict[str, Path] = {}
    if date := _date(path):
        files = {task: path.with_name(f"samples_{task}_{date}.jsonl") for task in results}
        samples = {task: file for task, file in files.items() if file.is_file()}
    return HarnessResults(path, sha256_file(path), content, samples)


def _date(path: Path) -> str:
    """Return the date in the name of a results file, which its samples share; empty for none."""
    match = _DATED.search(path.name)
    return match[1] if match else ""


def _flat_sample(sample: Mapping[str, Any]) -> dict[str, object]:
    prompt = sample["arguments"]["gen_args_0"]["arg_0"]
    return {"doc_id": sample["doc_id"], "prompt": prompt} | {
        name: json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value
        for name, value in sample.items()
    }
