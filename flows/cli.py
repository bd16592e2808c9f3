"""``python -m flows``: run recipes from the checkout.

With ``--json`` a command prints one JSON document on stdout and nothing else. Errors go to stderr
with exit status 1.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from flows import services, store
from flows.serve import serve
from tasks.cluster.stopping import stoppable
from umim_core.cli.console_output import JsonFlag, VersionFlag, emit, log_lines
from umim_core.errors import UmimError

if TYPE_CHECKING:
    from umim_core.config.any_recipe import AnyRecipe

app = typer.Typer(
    name="python -m flows",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(store.app, name="store")
for command in (services.up, services.down, services.status, services.deploy, serve):
    app.command()(command)
_QUIET = {
    "PREFECT_LOGGING_LEVEL": "WARNING",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "true",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
}


def main() -> None:
    """Run the command line."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    if "PREFECT_API_URL" in os.environ:  # a server that died is asked again once at every call
        os.environ.setdefault("PREFECT_CLIENT_MAX_RETRIES", "1")
    try:
        with stoppable():
            app()
    except UmimError as error:
        notes = getattr(error, "__notes__", [])
        typer.echo("\n".join([f"flows: error: {error}", *notes]), err=True)
        raise SystemExit(1) from None


@app.command()
def run(
    recipe: Annotated[str, typer.Argument(help="Recipe name, or a path ending in .yaml.")],
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Validate, list the stages in order, and tell whether the training fits the "
            "recipe's hardware.",
        ),
    ] = False,
    flow: Annotated[
        Literal["full", "mine", "distill", "adapt", "evaluate", "benchmark", "ablate"],
        typer.Option(help="Stop after this part; full ends with the report page."),
    ] = "full",
    confirm_run_unsafe_code: Annotated[
        bool,
        typer.Option(
            "--confirm-run-unsafe-code",
            help="Let a table's tasks run programs that a model wrote (HumanEval), each confined.",
        ),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Run a whole recipe; finished stages are found, not run again."""
    from tasks.run.recipes import confirmed, find_recipe, refuse_part

    loaded = find_recipe(recipe)
    refuse_part(loaded, flow)
    if confirm_run_unsafe_code:
        loaded = confirmed(loaded)
    if dry_run:
        _show_plan(loaded, flow, as_json)
        return
    _log_progress()
    from flows.launch import launch
    from tasks.run.prefect_runs import prefect_must_answer, start_temporary_server

    start_temporary_server()
    with prefect_must_answer():
        launch(recipe, loaded, flow, confirm_run_unsafe_code, as_json)


def _show_plan(recipe: AnyRecipe, flow: str, as_json: bool) -> None:
    from flows.parts import plan
    from tasks.plan.recipe_memory import memory_lines, memory_of_cells
    from tasks.run.checks import check_backbones, check_machine
    from umim_core.config.adaptation_recipe import AdaptationRecipe
    from umim_core.config.recipe import Recipe
    from umim_core.config.table_recipe import TableRecipe

    unknown = check_backbones(recipe) if isinstance(recipe, Recipe) else []
    steps, cells = plan(recipe), memory_of_cells(recipe)
    document: dict[str, object] = {"recipe": recipe.name, "stages": steps}
    if unknown:
        document["backbones_not_looked_up"] = unknown
    lines = [f"{step['stage']:<12} {step['of']}" for step in steps]
    lines += [f"not looked up, the hub is out of reach: {name}" for name in unknown]
    if cells:
        document["distillation"] = [cell.as_dict() for cell in cells]
    emit(document, [*lines, *memory_lines(cells)], as_json)
    for cell in cells:
        cell.check()
    # A recipe with hardware is meant for that machine, a table or curves for a cluster.
    elsewhere = cells or isinstance(recipe, TableRecipe | AdaptationRecipe)
    if not elsewhere:
        check_machine(recipe, "umim" if flow == "full" else f"umim-{flow}")


@app.command()
def recipes(as_json: JsonFlag = False) -> None:
    """List the recipes."""
    from tasks.run.recipes import all_names, find_recipe

    descriptions = {name: find_recipe(name).description for name in all_names()}
    lines = [f"{name:<34} {text.strip().splitlines()[0]}" for name, text in descriptions.items()]
    emit({"recipes": descriptions}, lines, as_json)


@app.command()
def report(
    tables: Annotated[
        bool,
        typer.Option(
            "--tables", help="Write the page of the paper's tables: its figures, ours, not run."
        ),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Print the path of the newest report page."""
    if tables:
        _report_tables(as_json)
        return
    from tasks.run.recipes import newest_report

    path = newest_report()
    emit({"path": str(path)}, [str(path)], as_json)


def _report_tables(as_json: bool) -> None:
    from tasks.cluster.ray_cluster import CHECKOUT
    from tasks.paper.paper_page import paper_page
    from umim_core.checkpoint.checkpoint_index import artifact_root
    from umim_core.store.disk import write_bytes

    page, folder = paper_page(CHECKOUT / "docs" / "results"), artifact_root() / "paper-tables"
    folder.mkdir(parents=True, exist_ok=True)
    paths = {"html": folder / "paper-tables.html", "markdown": folder / "paper-tables.md"}
    write_bytes(paths["html"], page.html.encode())
    write_bytes(paths["markdown"], page.markdown.encode())
    rows = [dict(zip(page.overview.headings, row, strict=True)) for row in page.overview.rows]
    lines = [f"{row['label']:<38} ours: {row['ours, on']}" for row in rows]
    shown = {name: str(path) for name, path in paths.items()}
    emit(shown | {"tables": rows}, [*lines, "", *shown.values()], as_json)


@app.command("log-lm-eval")
def log_lm_eval(
    path: Annotated[
        Path,
        typer.Argument(
            help="What lm_eval got as --output_path (DIR or NAME.json), or a results file."
        ),
    ],
    as_json: JsonFlag = False,
) -> None:
    """Write results of lm_eval to MLflow: figures, settings, and the logged samples as tables."""
    from tasks.tracking.harness_results import find_results, log_results
    from tasks.tracking.mlflow_store import Store
    from tasks.tracking.tracker import Tracker

    result_files, tracker = find_results(path), Tracker()
    store, rows, lines = Store(tracker.uri, tracker.root, "umim"), [], []
    for results in result_files:
        logged = log_results(store, results, tracker.owner)
        rows.append({**vars(logged), "file": str(results.path), "samples": [*results.samples]})
        lines.append(f"{results.name}: run {logged.run_id}{'' if logged.new else ', was there'}")
        if not results.samples:
            lines.append("  no samples: lm_eval --log_samples writes them")
    emit({"runs": rows}, lines, as_json)


_SHOWN: Final = {
    "umim.stage",
    "umim.pipeline",
    "umim.tracking",
    "umim.lock",
    "umim.count",
    "umim.progress",
    "umim.generate",
    "umim.confidence",
}


@app.callback()
def _options(version: VersionFlag = False) -> None:
    """Run the UMIM pipeline from this checkout."""


def _log_progress() -> None:
    """Show the stages on stderr, one line each, and all warnings."""
    handler = log_lines("umim")
    handler.addFilter(lambda record: record.levelno >= logging.WARNING or record.name in _SHOWN)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # its warnings are about its own options
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).addFilter(_without_traceback)


def _without_traceback(record: logging.LogRecord) -> bool:
    """Drop the traceback of an error whose message says what to do; the message is shown once."""
    if record.exc_info and isinstance(record.exc_info[1], UmimError):
        record.exc_info = None
    return True
