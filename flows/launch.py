"""Start of a recipe's flow from the command line, and what is shown of its result."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from umim_core.cli.console_output import emit
from umim_core.config.adaptation_recipe import AdaptationRecipe
from umim_core.config.any_recipe import AnyRecipe
from umim_core.config.table_recipe import TableRecipe


def launch(
    recipe: str, loaded: AnyRecipe, flow: str, confirm_run_unsafe_code: bool, as_json: bool
) -> None:
    """Run the flow that a recipe is for, and print its result."""
    if isinstance(loaded, TableRecipe):
        from flows.table import table as measure
        from tasks.report.score_lines import score_lines
        from umim_core.store.artifacts import read_json

        measured = measure(recipe, confirm_run_unsafe_code)
        found = read_json(Path(measured))
        emit({"path": measured, "table": found}, [*score_lines(found), measured], as_json)
        return
    if isinstance(loaded, AdaptationRecipe):
        from flows.adapt import adapt
        from tasks.stages.adaptation_result import RESULT

        (made,) = adapt(recipe)
        path = Path(made[RESULT])
        page = (path / f"{RESULT}.md").read_text(encoding="utf-8")
        emit({"path": str(path)}, [page, str(path)], as_json)
        return
    if flow != "full":
        found = getattr(import_module(f"flows.{flow}"), flow)(recipe)
        shown = found if isinstance(found, str) else json.dumps(found, indent=1)
        emit({"flow": flow, "result": found}, [shown, *_checkpoint_lines(loaded.name)], as_json)
        return
    from flows.full_pipeline import full_pipeline
    from tasks.report.comparison_table import SETTINGS, comparison
    from tasks.report.report_data import ReportData
    from tasks.report.tables import table_text

    began = time.monotonic()
    path = Path(full_pipeline(recipe))
    data = ReportData.model_validate_json((path / "report.json").read_text(encoding="utf-8"))
    table = comparison(data.rows, data.config)
    lines = [
        table_text(replace(table, note=f"{SETTINGS} {table.note}")).rstrip(),
        "",
        f"report: {path / 'report.html'}",
        f"{time.monotonic() - began:.0f} s",
        *_checkpoint_lines(loaded.name),
    ]
    emit(data.model_dump(mode="json") | {"path": str(path)}, lines, as_json)


def _checkpoint_lines(recipe: str) -> list[str]:
    """Return the names and directories of what the recipe trained, and how to use the first."""
    from umim_core.checkpoint.next_steps import after_training
    from umim_core.checkpoint.own_checkpoints import own_checkpoints, own_name

    prefix = own_name(recipe) + "/"
    found = {name: path for name, path in own_checkpoints().items() if name.startswith(prefix)}
    if not found:
        return []
    width = max(map(len, found))
    lines = [f"  {name:<{width}}  {path}" for name, path in found.items()]
    return ["", "checkpoints:", *lines, "", "Next:", *after_training(next(iter(found)))]
