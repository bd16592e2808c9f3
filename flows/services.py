"""``python -m flows up | down | status | deploy``: local services, and flows in Prefect."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from umim_core.checkpoint.checkpoint_index import artifact_root
from umim_core.cli.console_output import JsonFlag, emit

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tasks.run.services import Service, ServiceState

PrefectPort = Annotated[int, typer.Option(min=1, max=65535, help="Port of Prefect's server.")]
MlflowPort = Annotated[int, typer.Option(min=1, max=65535, help="Port of MLflow.")]


def up(
    prefect_port: PrefectPort = 4200, mlflow_port: MlflowPort = 5000, as_json: JsonFlag = False
) -> None:
    """Start Prefect's server, MLflow and a Prefect worker on 127.0.0.1, or find them running."""
    from tasks.run import services

    folder, wanted = _wanted(prefect_port, mlflow_port)
    states = services.up(folder, wanted)
    prefect, mlflow, _ = wanted
    exports = f"export PREFECT_API_URL={prefect.url}/api MLFLOW_TRACKING_URI={mlflow.url}"
    _show(states, as_json, [exports])


def down(
    prefect_port: PrefectPort = 4200, mlflow_port: MlflowPort = 5000, as_json: JsonFlag = False
) -> None:
    """End the services that `up` started; their databases stay."""
    from tasks.run import services

    _show(services.down(*_wanted(prefect_port, mlflow_port)), as_json)


def status(
    prefect_port: PrefectPort = 4200, mlflow_port: MlflowPort = 5000, as_json: JsonFlag = False
) -> None:
    """Say which services run and answer."""
    from tasks.run import services

    _show(services.status(*_wanted(prefect_port, mlflow_port)), as_json)


def deploy() -> None:
    """Register pool and deployments with Prefect; killed runs become Crashed."""
    from tasks.run import deployments

    deployments.deploy()


def _wanted(prefect_port: int, mlflow_port: int) -> tuple[Path, list[Service]]:
    from tasks.run.services import local_services

    folder = artifact_root() / "services"
    return folder, local_services(folder, prefect_port, mlflow_port)


def _show(states: Sequence[ServiceState], as_json: bool, more: Sequence[str] = ()) -> None:
    lines = [f"{of.name:<15} {of.state:<9} {of.url or ''}".rstrip() for of in states]
    emit({"services": [asdict(of) for of in states]}, [*lines, *more], as_json)
