from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.cli.deploy._models import DeploymentConfig, PrefectYamlModel
from prefect.flows import Flow

from tasks.run.recipes import all_names

ROOT = Path(__file__).resolve().parents[2]


def raw() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "prefect.yaml").read_text("utf-8"))
    return found


def deployments() -> list[DeploymentConfig]:
    return PrefectYamlModel.model_validate(raw()).deployments


def flow_of(deployment: DeploymentConfig) -> Flow[..., Any]:
    module, _, name = str(deployment.entrypoint).partition(":")
    found: Flow[..., Any] = getattr(import_module(module), name)
    return found


def test_every_flow_has_a_deployment() -> None:
    texts = [path.read_text("utf-8") for path in (ROOT / "flows").glob("*.py")]
    names = {name for text in texts for name in re.findall(r'^@flow\(name="([^"]+)"', text, re.M)}
    assert len(names) > 5
    assert {flow_of(found).name for found in deployments()} == names


@pytest.mark.parametrize("deployment", deployments(), ids=lambda found: found.name)
def test_a_deployment_has_parameters_of_its_flow_a_recipe_a_pool_and_a_limit(
    deployment: DeploymentConfig,
) -> None:
    flow = flow_of(deployment)
    parameters = dict(deployment.parameters or {})
    assert set(parameters) <= set(flow.parameters.properties)
    assert flow.validate_parameters(parameters)
    assert parameters["recipe"] in all_names()
    assert deployment.tags and "umim" in deployment.tags
    assert deployment.work_pool is not None and deployment.work_pool.name == "umim-pool"
    limit = deployment.concurrency_limit
    assert not isinstance(limit, int | None) and (limit.limit, limit.collision_strategy) == (
        1,
        "ENQUEUE",
    )
