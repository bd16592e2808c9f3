"""``python -m flows``: run recipes from the checkout.

With ``--json`` a command prints one JSON document on stdout and nothing else. Errors go to stderr
with exit status 1.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from tasks.cluster.ray_cluster import NO_TELEMETRY
from tasks.cluster.stopping import stoppable
from tasks.storage import store_commands
from umim_core.checkpoint.checkpoint_index import artifact_root
from umim_core.cli.console_output import JsonFlag, VersionFlag, emit, log_lines, telling
from umim_core.cli.documented import AtLeast1, Commands, MaybeArgument, command
from umim_core.cli.serve_command import ServerOptions
from umim_core.errors import UmimError
from umim_core.progress import numbered

if TYPE_CHECKING:
    from umim_core.config.recipe_files import AnyRecipe

app = typer.Typer(
    name="python -m flows",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(store_commands.app, name="store")
Port = Annotated[int | None, typer.Option(min=1, max=65535)]
Share = Annotated[float, typer.Option(min=0, max=4096)]
_SHOWN: Final = {f"umim.{name}" for name in ("stage", "pipeline", "tracking", "lock", "progress")}
_QUIET: Final = {
    "PREFECT_LOGGING_LEVEL": "WARNING",
    **NO_TELEMETRY,
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "true",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
}


def main() -> None:
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    if "PREFECT_API_URL" in os.environ:  # a server that died is asked again once at every call
        os.environ.setdefault("PREFECT_CLIENT_MAX_RETRIES", "1")
    with telling("flows"), stoppable():
        app()


@app.command()
@command
def run(
    recipe: str,
    dry_run: bool = False,
    flow: Literal["full", "mine", "distill", "adapt", "evaluate", "benchmark", "ablate"] = "full",
    confirm_run_unsafe_code: bool = False,
    as_json: JsonFlag = False,
) -> None:
    """Run a whole recipe; finished stages are found, not run again.

    Options:
        recipe: Recipe name, or a path ending in .yaml.
        dry_run: Validate, count the stages by kind (--json lists each), and tell whether the
            training fits the recipe's hardware.
        flow: Stop after this part; full ends with the report page.
        confirm_run_unsafe_code: Let a table's tasks run programs that a model wrote (HumanEval),
            each confined.
    """
    from tasks.run.recipes import confirmed, find_recipe, refuse_part

    loaded = find_recipe(recipe)
    refuse_part(loaded, flow)
    if confirm_run_unsafe_code:
        loaded = confirmed(loaded)
    if dry_run:
        _show_plan(loaded, flow, as_json)
        return
    _log_progress()
    from flows.pipeline_flows import launch

    launch(recipe, loaded, flow, confirm_run_unsafe_code, as_json)


def _show_plan(recipe: AnyRecipe, flow: str, as_json: bool) -> None:
    from flows.parts import plan
    from flows.planner import memory_of_cells
    from tasks.run.checks import check_machine, check_recipe
    from umim_core.config.adaptation_recipe import AdaptationRecipe
    from umim_core.config.table_recipe import TableRecipe

    name = "umim" if flow == "full" else f"umim-{flow}"
    unknown = check_recipe(recipe, name, planned=True)
    steps, cells = plan(recipe), memory_of_cells(recipe)
    document: dict[str, object] = {"recipe": recipe.name, "stages": steps}
    if unknown:
        document["backbones_not_looked_up"] = unknown
    lines = _stage_lines(steps)
    lines += [f"not looked up, the hub is out of reach: {name}" for name in unknown]
    if cells:
        document["distillation"] = [cell.as_dict() for cell in cells]
        largest = max(cells, key=lambda cell: cell.memory_bytes)
        lines.append(f"{numbered(len(cells), 'training')}, the largest: {largest.line()}")
    emit(document, lines, as_json)
    for cell in cells:
        cell.check()
    # A recipe with hardware is meant for that machine, a table or curves for a cluster.
    elsewhere = cells or isinstance(recipe, TableRecipe | AdaptationRecipe)
    if not elsewhere:
        check_machine(recipe, name)


def _stage_lines(steps: Sequence[Mapping[str, str]]) -> list[str]:
    """Return a line per kind of stage: how many there are, and of what the first ones."""
    kinds: dict[str, list[str]] = {}
    for step in steps:
        kinds.setdefault(step["stage"], []).append(step["of"])
    width = max(map(len, kinds))
    return [
        f"{kind:<{width}}{len(names):>6}  {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
        for kind, names in kinds.items()
    ]


@app.command()
def recipes(as_json: JsonFlag = False) -> None:
    """List the recipes of infra/recipes, a line each."""
    from tasks.run.recipes import all_names, find_recipe

    found = {name: find_recipe(name) for name in all_names()}
    width = max(map(len, found))
    lines = [
        f"{name:<{width}}  {shorten(recipe.description, 98 - width, placeholder=' …')}"
        for name, recipe in found.items()
    ]
    listed = {
        name: {"kind": recipe.kind, "description": recipe.description}
        for name, recipe in found.items()
    }
    emit({"recipes": listed}, lines, as_json)


@app.command()
def report(as_json: JsonFlag = False) -> None:
    """Print the path of the newest report page."""
    from tasks.run.recipes import newest_report

    path = newest_report()
    emit({"path": str(path)}, [str(path)], as_json)


@app.command("log-lm-eval")
@command
def log_lm_eval(path: Path, as_json: JsonFlag = False) -> None:
    """Write results of lm_eval to MLflow: figures, settings, and the logged samples as tables.

    Options:
        path: What lm_eval got as --output_path (DIR or NAME.json), or a results file.
    """
    from tasks.tracking.harness_results import find_results, log_results
    from tasks.tracking.tracker import Tracker

    tracker, rows, lines = Tracker(), [], []
    for results in find_results(path):
        logged = log_results(tracker, results)
        rows.append({**logged, "file": str(results.path), "samples": [*results.samples]})
        new = "" if logged["new"] else ", was there"
        lines.append(f"{results.name}: run {logged['run_id']}{new}")
        if not results.samples:
            lines.append("  no samples: lm_eval --log_samples writes them")
    emit({"runs": rows}, lines, as_json)


@app.command()
def deploy() -> None:
    """Register pool and deployments with Prefect; killed runs become Crashed."""
    from tasks.run import prefect_runs

    prefect_runs.deploy()


def _add_service_command(action: str, summary: str) -> None:
    @app.command(action, help=summary)
    @command
    def service_command(
        prefect_port: Port = None, mlflow_port: Port = None, as_json: JsonFlag = False
    ) -> None:
        """Call the function of that name and print how each service is.

        Options:
            prefect_port: Port of Prefect's server (the one that it has, or 4200).
            mlflow_port: Port of MLflow (the one that it has, or 5000).
        """
        from tasks.run import services

        folder = artifact_root() / "services"
        wanted = services.local_services(folder, prefect_port, mlflow_port)
        states = getattr(services, action)(folder, wanted)
        lines = [f"{one.name:<15} {one.state:<9} {one.url or ''}".rstrip() for one in states]
        if action == "up":
            api, mlflow = f"{wanted[0].url}/api", wanted[1].url
            lines.append(f"export PREFECT_API_URL={api} MLFLOW_TRACKING_URI={mlflow}")
        emit({"services": [asdict(one) for one in states]}, lines, as_json)


for _action, _summary in {
    "up": "Start Prefect's server, MLflow and a Prefect worker on 127.0.0.1, or find them running.",
    "down": "End the services that `up` started; their databases stay.",
    "status": "Say which services run and answer.",
}.items():
    _add_service_command(_action, _summary)


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


@app.command()
@command
def serve(
    checkpoint: MaybeArgument = None,
    replicas: AtLeast1 = 2,
    max_replicas: Annotated[int | None, typer.Option(min=1)] = None,
    cpus: Share = 1.0,
    gpus: Share = 0,
    address: str | None = None,
    *,
    server: ServerOptions,
) -> None:
    """Serve a checkpoint as `umim serve` does, by replicas of its engine on a Ray cluster.

    Options:
        checkpoint: As of umim serve; every machine must be able to load it.
        replicas: Replicas, or the fewest of them.
        max_replicas: Let their number follow the length of the queue up to this.
        cpus: CPU cores of a replica.
        gpus: GPUs of a replica; give --device cuda.
        address: Ray cluster, host:port or auto; by default this machine.
    """
    token, limits = server.token(), server.limits()
    from tasks.cluster.replicas import Replicas, replicated
    from umim_core.serving.engine_server import EngineServer

    load, number = server.loading(), Replicas(replicas, max_replicas, cpus, gpus, address)
    load["checkpoint"] = checkpoint
    with replicated(load, server.sizes(), number) as engine:
        signal.set_wakeup_fd(-1)  # at TERM the server ends open answers first, then the run stops
        server.run(EngineServer(engine, limits).app(token))
