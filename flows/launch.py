"""Start of a recipe's flow from the command line, and what is shown of its result."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

from prefect import Flow
from prefect.settings import PREFECT_API_URL

from flows import pipeline_flows
from tasks.report.comparison import summary
from tasks.report.render import file_table, table_text
from tasks.report.report import ReportData
from tasks.run.prefect_runs import prefect_must_answer
from tasks.stages.adaptation import RESULT
from umim_core.cli.console_output import emit
from umim_core.config.adaptation_recipe import AdaptationRecipe
from umim_core.config.recipe_files import AnyRecipe
from umim_core.config.table_recipe import TableRecipe
from umim_core.evaluation.sizes import REDUCTIONS
from umim_core.store.artifacts import read_json

_DIFFERENCE: Final = "_difference"
P = ParamSpec("P")
T = TypeVar("T")
Row = Mapping[str, Any]


def score_lines(table: Mapping[str, Any]) -> list[str]:
    """Return a line per task and setting of the content of a ``table.json``.

    A figure is a mean over questions with its standard error, ``diff`` behind a metric is its
    paired difference to the first setting; ``4 x 256`` are four answers per question of at most 256
    tokens. TR is that of all tokens that were read or generated, a prompt's as often as it was
    answered; cache TR is what a policy dropped of the contexts' KV cache, and shortfall the part of
    contexts that a baseline should have dropped and could not. Tasks with other metrics stand in a
    table of their own; tasks that were not run and the figures of texts have lines of their own.
    """
    scores: Sequence[Row] = table["scores"]
    shared = {"first": next(iter(table.get("settings") or ()), None), "reductions": REDUCTIONS}
    lines: list[str] = []
    for metrics, rows in _by_metrics(scores).items():
        columns = file_table("score_columns.txt", rows, metrics=metrics, **shared)
        lines += ["", *table_text(columns).splitlines()]
    unrun = [f"{score['task']}: {score['not_run']}" for score in scores if "not_run" in score]
    lines += dict.fromkeys(unrun)
    for text in table["texts"]:
        lines += [f"{text['text']}: {name} {value:.4g}" for name, value in text.items()
                  if not isinstance(value, str)]  # fmt: skip
    return lines[1:] if lines[:1] == [""] else lines


def _by_metrics(scores: Sequence[Row]) -> dict[tuple[str, ...], list[Row]]:
    """Return the rows of tasks that were run by the metrics of a task, reductions aside."""
    of_tasks: dict[str, dict[str, None]] = {}
    for row in scores:
        names = [name for name, value in row.items() if isinstance(value, dict)]
        own = [name for name in names if not name.endswith(_DIFFERENCE) and name not in REDUCTIONS]
        of_tasks.setdefault(row["task"], {}).update(dict.fromkeys(own))
    grouped: dict[tuple[str, ...], list[Row]] = {}
    for row in scores:
        if "not_run" not in row:
            grouped.setdefault(tuple(of_tasks[row["task"]]), []).append(row)
    return grouped


def _called(flow: Flow[P, T]) -> Callable[P, T]:
    """Return a flow, or its function alone where no Prefect server is named: none is started."""
    return prefect_must_answer()(flow) if PREFECT_API_URL.value() else flow.fn


def launch(
    recipe: str, loaded: AnyRecipe, flow: str, confirm_run_unsafe_code: bool, as_json: bool
) -> None:
    if isinstance(loaded, TableRecipe):
        measured = _called(pipeline_flows.table)(recipe, confirm_run_unsafe_code)
        content = read_json(Path(measured))
        emit({"path": measured, "table": content}, [*score_lines(content), measured], as_json)
        return
    if isinstance(loaded, AdaptationRecipe):
        (folders,) = _called(pipeline_flows.adapt)(recipe)
        path = Path(folders[RESULT])
        page = (path / f"{RESULT}.md").read_text(encoding="utf-8")
        emit({"path": str(path)}, [page, str(path)], as_json)
        return
    if flow != "full":
        result = _called(getattr(pipeline_flows, flow))(recipe)
        shown = result if isinstance(result, str) else json.dumps(result, indent=1)
        emit({"flow": flow, "result": result}, [shown, *_checkpoint_lines(loaded.name)], as_json)
        return
    began = time.monotonic()
    path = Path(_called(pipeline_flows.full_pipeline)(recipe))
    data = ReportData.model_validate_json((path / "report.json").read_text(encoding="utf-8"))
    lines = [
        table_text(summary(data.rows, data.config)).rstrip(),
        "",
        f"report: {path / 'report.html'}",
        f"{time.monotonic() - began:.0f} s",
        *_checkpoint_lines(loaded.name),
    ]
    emit(data.model_dump(mode="json") | {"path": str(path)}, lines, as_json)


def _checkpoint_lines(recipe: str) -> list[str]:
    """Return the names of what the recipe trained, and how to use the first."""
    from umim_core.checkpoint.checkpoint_index import own_checkpoints, own_name
    from umim_core.checkpoint.next_steps import after_training

    prefix = own_name(recipe) + "/"
    names = [name for name in own_checkpoints() if name.startswith(prefix)]
    if not names:
        return []
    return ["", "checkpoints:", *(f"  {name}" for name in names), "", *after_training(names[0])]
