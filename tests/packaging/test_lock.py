"""The lock file: a version and hashes of every dependency, no index address (reliability 46)."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from support.processes import ROOT

REQUIREMENTS = ROOT / "requirements"
PIN = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)")
LOCKED_EXTRAS = ("pipeline", "s3", "serve", "eval", "bench", "dev")


def read_lock(path: Path) -> dict[str, tuple[Version, int]]:
    """Normalised name -> version and number of hashes."""
    pins: dict[str, tuple[Version, int]] = {}
    name = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("    --hash=sha256:"):
            version, hashes = pins[name]
            pins[name] = (version, hashes + 1)
        elif line and not line.lstrip().startswith("#"):
            found = PIN.match(line)
            assert found, f"{path.name}: not an exact pin: {line}"
            name = canonicalize_name(found[1])
            assert name not in pins, f"{path.name}: {name} is listed twice"
            pins[name] = (Version(found[2]), 0)
    return pins


@pytest.mark.parametrize("name", ["lock.txt", "build.txt", "gpu.txt", "docs.txt", "server.txt"])
def test_every_pin_has_a_hash(name: str) -> None:
    pins = read_lock(REQUIREMENTS / name)
    assert pins
    assert [p for p, (_, hashes) in pins.items() if hashes == 0] == []


def test_no_file_names_an_index() -> None:
    for path in sorted(REQUIREMENTS.glob("*.txt")):
        text = path.read_text(encoding="utf-8")
        assert "://" not in text, path.name
        assert not re.search(r"^--?[a-z]", text, re.MULTILINE), f"{path.name} holds an option"


def test_lock_satisfies_every_declared_range() -> None:
    locked = {name: pin[0] for name, pin in read_lock(REQUIREMENTS / "lock.txt").items()}
    torch = PIN.search((REQUIREMENTS / "torch.txt").read_text().splitlines()[-1])
    assert torch
    locked["torch"] = Version(torch[2])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for e in LOCKED_EXTRAS for line in project["optional-dependencies"][e]]
    for requirement in map(Requirement, project["dependencies"] + extras):
        version = locked.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name} is declared and not locked"
        assert requirement.specifier.contains(version), f"{requirement} against {version}"


def test_environment_has_the_locked_versions() -> None:
    wrong = {}
    for name, (version, _) in read_lock(REQUIREMENTS / "lock.txt").items():
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            installed = "nothing"
        if installed != str(version):
            wrong[name] = f"locked {version}, installed {installed}"
    assert wrong == {}, "run `make env`"
