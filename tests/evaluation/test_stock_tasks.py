"""lm-eval's own tasks as they are, on local data: by the literal command, and long contexts.

The command first indexes 14,000 files of its tasks, for twenty seconds. Quickly it finds its own
package with the folders of the two tasks alone, and in the full set as it is installed.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import shutil
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


def has_asset(part: str) -> bool:
    path = embedded_path(NAME, part)
    return path is not None and (path / "config.json").is_file()


INSTALLED = {found.name for found in importlib.metadata.distributions()}
NEEDED = {
    "no local copies of the stock tasks (shared/hub)": HUB.is_dir(),
    "lm-eval is the `eval` extra": COMMAND.is_file(),
    "umim is not installed: no start-up hook": "umim" in INSTALLED,  # by the package's .pth file
    "the embedded backbone is not built": has_asset("backbone"),
    "the embedded checkpoint is not built": has_asset("checkpoint"),
}
MISSING = [reason for reason, is_there in NEEDED.items() if not is_there]


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


@pytest.mark.skipif(bool(MISSING), reason="; ".join(MISSING))
@pytest.mark.parametrize("index", ["two folders", pytest.param("all", marks=pytest.mark.full)])
def test_the_literal_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: str) -> None:
    if index != "all":
        packages = str(with_few_tasks(tmp_path / "packages"))
        monkeypatch.setenv("PYTHONPATH", packages, prepend=os.pathsep)
    environment = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "hf"),
        "UMIM_MODELS": str(tmp_path / "models"),  # none is fetched: the default is the embedded one
        "OMP_NUM_THREADS": "1",
    }
    words = ["--model", "umim", "--tasks", "arc_easy,piqa", "--limit", "10", "--output_path"]
    command = (COMMAND, *words, str(tmp_path / "out"))
    done = run_command(*command, cwd=HUB, without=("UMIM_CHECKPOINT",), **environment)
    assert done.returncode == 0, done.stderr[-4000:]
    [path] = (tmp_path / "out").rglob("results_*.json")
    result = json.loads(path.read_text("utf-8"))
    assert {"arc_easy", "piqa"} <= set(result["results"])
    assert result["config"]["umim"]["merge"] == "prompt"
    assert result["config"]["umim"]["token_reduction"] > 0
    assert f"checkpoint {NAME} (from the embedded default)" in done.stderr
    assert "|arc_easy|" in done.stdout and "|piqa " in done.stdout
