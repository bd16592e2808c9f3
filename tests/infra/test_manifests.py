"""Images, compose.yaml, Kubernetes and workflows: pinned, of the lock's versions, well formed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import check_jsonschema
import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner
from jsonschema import Draft202012Validator

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "infra/docker/Dockerfile"
KUBERNETES = ROOT / "infra/k8s"
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yaml"))
MANIFESTS = sorted(KUBERNETES.glob("base/*.yaml"))
VERSION = str(tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"])
PINNED = re.compile(r"[\w./-]+:\d+(\.\d+)+(-[\w.-]+)?")
OWN = re.compile(rf"umim:{re.escape(VERSION)}-(cpu|gpu)")
SCHEMAS = {f".github/workflows/{path.name}": "github-workflows" for path in WORKFLOWS} | {
    "compose.yaml": "compose-spec"
}


def locked(name: str) -> str:
    found = re.search(rf"^{name}==(\S+)", (ROOT / "requirements/lock.txt").read_text("utf-8"), re.M)
    assert found
    return found[1]


def documents(path: Path) -> list[Any]:
    return [found for found in yaml.safe_load_all(path.read_text("utf-8")) if found]


def walk(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every mapping inside a value."""
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value:
        if isinstance(inner, dict | list):
            yield from walk(inner)


def images(value: Any) -> list[str]:
    return [part["image"] for part in walk(value) if isinstance(part.get("image"), str)]


def test_every_path_that_the_image_copies_exists_and_reaches_the_builder() -> None:
    lines = re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE.read_text("utf-8"), re.M)
    paths = [path for line in lines for path in line.split()[:-1]]
    allowed = re.findall(r"^!([^/\n]+)", (ROOT / ".dockerignore").read_text("utf-8"), re.M)
    assert {"tasks", "flows", "requirements/lock.txt"} <= set(paths)
    assert [path for path in paths if not (ROOT / path).exists()] == []
    assert [path for path in paths if path.split("/")[0] not in allowed] == []


def test_images_are_pinned_and_of_the_versions_of_project_and_lock() -> None:
    compose = images(documents(ROOT / "compose.yaml"))
    kubernetes = [name for path in MANIFESTS for name in images(documents(path))]
    patches = [
        patch["value"]
        for path in KUBERNETES.glob("overlays/*/*.yaml")
        for patch in yaml.safe_load(path.read_text("utf-8"))
        if isinstance(patch, dict) and patch["path"].endswith("/image")
    ]
    assert len(compose) >= 8 and len(kubernetes) >= 7 and len(patches) == 2
    text = DOCKERFILE.read_text("utf-8")
    stages = re.findall(r"^FROM \S+ AS (\S+)", text, re.M)
    bases = [name for name in re.findall(r"^FROM (\S+)", text, re.M) if name not in stages]
    for name in (*compose, *kubernetes, *patches, *bases):
        assert (OWN if name.startswith("umim:") else PINNED).fullmatch(name), name
    rays = [
        part["rayVersion"]
        for path in MANIFESTS
        for part in walk(documents(path))
        if "rayVersion" in part
    ]
    assert rays == [locked("ray")] * 2


def test_the_image_runs_as_nobody_special_and_installs_by_hash() -> None:
    text = DOCKERFILE.read_text("utf-8")
    last = {
        name: body for name, body in re.findall(r" AS (cpu|gpu)\n(.*?)(?=\nFROM|\Z)", text, re.S)
    }
    assert all("USER 10001" in last[target] for target in ("cpu", "gpu"))
    installs = re.findall(r"pip install [^&\n]*-r requirements/(\S+)", text)
    hashed = re.findall(r"pip install [^&\n]*--require-hashes -r requirements/(\S+)", text)
    assert set(installs) - set(hashed) == {"torch.txt"}  # its builds have no common hash


def test_compose_publishes_on_loopback_alone_checks_health_and_holds_no_secret() -> None:
    (compose,) = documents(ROOT / "compose.yaml")
    services = compose["services"]
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert ports and all(port.startswith("127.0.0.1:") for port in ports)
    needed = {name for service in services.values() for name in service.get("depends_on", {})}
    assert {name for name in needed if "healthcheck" not in services[name]} == set()
    assert all(
        found == {"condition": "service_healthy"}
        for service in services.values()
        for found in service.get("depends_on", {}).values()
    )
    asked = set(re.findall(r"\$\{(\w+):\?", (ROOT / "compose.yaml").read_text("utf-8")))
    offered = re.findall(r"^(\w+)=(.*)$", (ROOT / ".env.example").read_text("utf-8"), re.M)
    assert asked == {name for name, _ in offered}
    assert all(value == "" for _, value in offered)
    for part in walk(compose):
        for name, value in part.items():
            if re.search("PASSWORD|SECRET|TOKEN|ACCESS_KEY", str(name)):
                assert re.fullmatch(r"\$\{\w+:\?[^}]*\}", value), name


def test_kustomizations_name_files_that_exist_and_patches_that_fit() -> None:
    base = yaml.safe_load((KUBERNETES / "base/kustomization.yaml").read_text("utf-8"))
    assert set(base["resources"]) == {path.name for path in MANIFESTS} - {"kustomization.yaml"}
    kinds = {manifest["kind"]: manifest for path in MANIFESTS for manifest in documents(path)}
    wanted = {"RayCluster", "RayJob", "Deployment", "Service", "NetworkPolicy", "Namespace"}
    assert wanted <= set(kinds)
    for overlay in ("cpu", "gpu"):
        folder = KUBERNETES / "overlays" / overlay
        made = yaml.safe_load((folder / "kustomization.yaml").read_text("utf-8"))
        assert all((folder / place / "kustomization.yaml").is_file() for place in made["resources"])
        for patch in made.get("patches", []):
            for change in yaml.safe_load((folder / patch["path"]).read_text("utf-8")):
                at: Any = kinds[patch["target"]["kind"]]
                *parents, last = change["path"].strip("/").split("/")
                for name in parents:
                    at = at[int(name)] if isinstance(at, list) else at[name]
                assert change["op"] == "add" or last in at


def test_every_container_is_confined_and_has_no_token_of_the_cluster() -> None:
    pods = [part for path in MANIFESTS for part in walk(documents(path)) if "containers" in part]
    assert len(pods) == 7
    for pod in pods:
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        for container in pod["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert "memory" in container["resources"]["limits"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_pin_their_actions_and_ask_for_no_more_than_they_need(path: Path) -> None:
    (workflow,) = documents(path)
    used = [part["uses"] for part in walk(workflow) if "uses" in part]
    assert used and all(re.search(r"@v\d+\.\d+\.\d+$", name) for name in used)
    assert workflow["permissions"] == {"contents": "read"}
    assert all("timeout-minutes" in job for job in workflow["jobs"].values())


@pytest.mark.parametrize("name", SCHEMAS)
def test_compose_and_workflows_fit_their_schemas(name: str) -> None:
    asked = ["--builtin-schema", f"vendor.{SCHEMAS[name]}", str(ROOT / name)]
    checked = CliRunner().invoke(check_jsonschema.main, asked)
    assert checked.exit_code == 0, checked.output


@pytest.mark.parametrize("name", ["ray-cluster", "ray-job"])
def test_ray_manifests_fit_the_schemas_of_kuberay(name: str) -> None:
    """What does not fit KubeRay's own schema; pods are checked by Kubernetes' schemas."""
    (manifest,) = documents(KUBERNETES / f"base/{name}.yaml")
    schemas = json.loads((ROOT / "tests/infra/kuberay.json").read_text("utf-8"))
    validator = Draft202012Validator({"$ref": f"#/{manifest['kind']}"} | schemas)
    assert [error.json_path for error in validator.iter_errors(manifest)] == []


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_fit_the_schemas_of_kubernetes(path: Path) -> None:
    for manifest in documents(path):
        checked = [] if manifest["kind"] == "Kustomization" else [manifest]
        if manifest["kind"] in ("RayCluster", "RayJob"):
            pods = [
                part
                for part in walk(manifest)
                if set(part) == {"spec"} and "containers" in part["spec"]
            ]
            assert len(pods) == 2
            pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}}
            checked = [pod | {"template": template} for template in pods]
        for one in checked:
            kubernetes_validate.validate(one, "1.31", strict=True)


def test_kustomize_builds_both_overlays() -> None:
    kustomize = shutil.which("kustomize")
    if kustomize is None:
        pytest.skip("kustomize is not installed: overlays were checked by their paths alone")
    for overlay in ("cpu", "gpu"):
        command = [kustomize, "build", str(KUBERNETES / "overlays" / overlay)]
        assert subprocess.run(command, capture_output=True).returncode == 0
