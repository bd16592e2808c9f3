"""The stock ``lm_eval`` command on stock tasks, offline, in the environment of this test run.

The command first indexes 14,000 files of its tasks, for twenty seconds. Quickly it finds its own
package with the folders of the two tasks alone, and in the full set as it is installed.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.processes import run_command
from umim_core.embedded.assets import embedded_path

HUB = Path(__file__).resolve().parents[3] / "shared" / "hub"
COMMAND = Path(sys.executable).parent / "lm_eval"
NAME = "umim-docs-llama"
FOLDERS = ("arc", "piqa")  # of lm-eval's tasks


def has_start_up_hook() -> bool:
    """The command finds ``umim`` through the package's .pth file."""
    try:
        importlib.metadata.distribution("umim")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def has_asset(part: str) -> bool:
    path = embedded_path(NAME, part)
    return path is not None and (path / "config.json").is_file()


pytestmark = [
    pytest.mark.skipif(not HUB.is_dir(), reason="no local copies of the stock tasks (shared/hub)"),
    pytest.mark.skipif(not COMMAND.is_file(), reason="lm-eval is the `eval` extra"),
    pytest.mark.skipif(not has_start_up_hook(), reason="umim is not installed: no start-up hook"),
    pytest.mark.skipif(not has_asset("backbone"), reason="the embedded backbone is not built"),
]


def with_few_tasks(folder: Path) -> Path:
    """Make lm-eval's package again, out of links to its files, with the tasks of two folders."""
    spec = find_spec("lm_eval")
    assert spec is not None and spec.origin is not None
    whole, copy = Path(spec.origin).parent, folder / "lm_eval"
    for name in FOLDERS:  # the index follows no links
        shutil.copytree(whole / "tasks" / name, copy / "tasks" / name)
    parts = [path for path in whole.iterdir() if path.name != "tasks"]
    for path in [*parts, *whole.glob("tasks/*.py")]:
        (copy / path.relative_to(whole)).symlink_to(path)
    return folder


def lm_eval(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "hf"),
        "UMIM_MODELS": str(tmp_path / "models"),  # none is fetched: the default is the embedded one
        "OMP_NUM_THREADS": "1",
    }
    done = run_command(COMMAND, *arguments, cwd=HUB, without=("UMIM_CHECKPOINT",), **environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return done


def only_result(folder: Path) -> dict:
    [path] = folder.rglob("results_*.json")
    return json.loads(path.read_text("utf-8"))


@pytest.mark.skipif(not has_asset("checkpoint"), reason="the embedded checkpoint is not built")
@pytest.mark.parametrize("index", ["two folders", pytest.param("all", marks=pytest.mark.full)])
def test_the_literal_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: str) -> None:
    if index != "all":
        monkeypatch.setenv(
            "PYTHONPATH", str(with_few_tasks(tmp_path / "packages")), prepend=os.pathsep
        )
    out = ["--output_path", str(tmp_path / "out")]
    done = lm_eval(tmp_path, "--model", "umim", "--tasks", "arc_easy,piqa", "--limit", "10", *out)
    result = only_result(tmp_path / "out")
    assert {"arc_easy", "piqa"} <= set(result["results"])
    assert result["config"]["umim"]["merge"] == "prompt"
    assert result["config"]["umim"]["token_reduction"] > 0
    assert f"checkpoint {NAME} (from the embedded default)" in done.stderr
    assert "|arc_easy|" in done.stdout and "|piqa " in done.stdout
