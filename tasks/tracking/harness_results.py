"""Results of lm-eval's command line as runs of the tracking store.

lm_eval writes ``results_DATE.json`` with ``--output_path DIR``, ``NAME_DATE.json`` with
``--output_path NAME.json``, and a file ``samples_TASK_DATE.jsonl`` per task with ``--log_samples``.
A results file becomes one run, found again by the file's digest.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tasks.tracking.tracker import Tracker
from umim_core.errors import EvaluationError
from umim_core.store.artifacts import sha256_file

if TYPE_CHECKING:
    from tasks.tracking.tracker import Run

_DATED: Final = re.compile(r"_(\d{4}-\d\d-\d\dT[\d.\-]+)\.json$")
_NAME_CHARS: Final = 250  # of a run, in MLflow's table of runs
_TASK_BYTES: Final = 200  # with the rest of the name of its samples' file 255
_REMEDY: Final = "Run lm_eval with --output_path DIR --log_samples, then name DIR."
# Besides config: what decides the figures. Task configurations stay in the file.
_DESCRIBED: Final = ("n-shot", "n-samples", "versions", "lm_eval_version", "chat_template_sha")


@dataclass(frozen=True)
class HarnessResults:
    path: Path
    key: str
    content: Mapping[str, Any]
    samples: Mapping[str, Path]

    @property
    def name(self) -> str:
        """Name of the run: model and tasks, cut where there are many."""
        name = f"lm-eval {self.content['config']['model']}: {', '.join(self.content['results'])}"
        return name if len(name) <= _NAME_CHARS else f"{name[: _NAME_CHARS - 3]}..."

    def params(self) -> dict[str, object]:
        """Return the settings, ``umim.module_digest`` among them."""
        config = dict(self.content["config"])
        if isinstance(model_args := config.get("model_args"), str):
            # None: "" of a model's defaults.
            parts = [part for part in model_args.split(",") if part]
            config["model_args"] = dict(part.partition("=")[::2] for part in parts)
        return config | {name: self.content[name] for name in _DESCRIBED if name in self.content}

    def metrics(self) -> dict[str, float]:
        """Return all figures: ``TASK/acc``, ``TASK/acc_stderr``, ``TASK/exact_match.FILTER``."""
        figures: dict[str, float] = {}
        for task, row in self.content["results"].items():
            for field, value in row.items():
                metric, comma, chosen = field.partition(",")
                if comma and isinstance(value, int | float) and not isinstance(value, bool):
                    ending = "" if chosen == "none" else f".{chosen}"
                    figures[f"{task}/{metric}{ending}"] = float(value)
        return figures

    def table(self, task: str) -> dict[str, list[object]]:
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
    tables = {task: results.table(task) for task in results.samples}
    began = int(1000 * float(results.content["date"]))
    took = int(1000 * float(results.content.get("total_evaluation_time_seconds") or 0))

    def files(run: Run) -> None:
        for task, columns in tables.items():
            tracker.client.log_table(run.info.run_id, columns, f"samples/{task}.json")
        tracker.log_files(run, [results.path])

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
            more=files,
        )
        return {"run_id": run.info.run_id, "experiment_id": tracker.experiment_id, "new": new}


def _read(path: Path) -> HarnessResults:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        began, took = content["date"], content.get("total_evaluation_time_seconds")
        if not (0 < float(began) < math.inf and 0 <= float(took or 0) < math.inf):
            raise ValueError("times must be finite")
        if not (content["results"] and isinstance(content["config"]["model"], str)):
            raise ValueError("a model and its tasks must be named")
        for task, row in content["results"].items():
            if "/" in task or "\0" in task or not 0 < len(task.encode()) <= _TASK_BYTES:
                raise ValueError(f"{task!r} must be a name that a file can bear")
            row.items()
        json.dumps(content, ensure_ascii=False).encode()  # a lone surrogate is refused here
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
        rule = "a results file must be as lm-eval writes it"
        raise EvaluationError(rule, f"{path}: {type(error).__name__}: {error}", _REMEDY) from error
    date = _date(path)
    files = {task: path.with_name(f"samples_{task}_{date}.jsonl") for task in content["results"]}
    samples = {task: file for task, file in files.items() if date and file.is_file()}
    return HarnessResults(path, sha256_file(path), content, samples)


def _date(path: Path) -> str:
    """Return the date in the name of a results file, which its samples share; empty for none."""
    match = _DATED.search(path.name)
    return match[1] if match else ""
