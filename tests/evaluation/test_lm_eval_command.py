"""`lm_eval --model umim` with the stock lm-eval: the start-up hook, and the literal command.

The command first indexes 14,000 files of its tasks, for twenty seconds. Here it finds its own
package with the folders of two tasks alone; the test of the whole way runs it as it is installed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from support.processes import ROOT, run_command

TARGET = "umim_core.evaluation.harness:UmimLM"
REGISTERED = """
from lm_eval.models import MODEL_MAPPING
from lm_eval.api.registry import model_registry
out = [len(MODEL_MAPPING), "umim" in model_registry, "hf" in model_registry]
"""
SETTINGS = ("UMIM_NO_LM_EVAL", "PYTHONPATH", "PYTHONSTARTUP")


def run_python(
    code: str, *options: str, cwd: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter of this environment, outside the checkout."""
    command = [sys.executable, *options, "-c", code]
    return run_command(*command, cwd=cwd, without=SETTINGS, **environment)


def answer(code: str, cwd: Path, **environment: str) -> Any:
    done = run_python(f"import json\n{code}\nprint(json.dumps(out))", cwd=cwd, **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_interpreter_start_loads_the_hook_and_nothing_heavy(tmp_path: Path) -> None:
    heavy = ("umim_core", "lm_eval", "torch", "numpy", "importlib.metadata")
    code = f"import sys\nout = [m for m in ('_umim_lm_eval', *{heavy!r}) if m in sys.modules]"
    assert answer(code, tmp_path) == ["_umim_lm_eval"]


def test_model_is_registered_lazily_beside_every_built_in_unless_switched_off(
    tmp_path: Path,
) -> None:
    count, *registered = answer(REGISTERED, tmp_path, UMIM_NO_LM_EVAL="1")
    assert registered == [False, True] and count > 20
    assert answer(REGISTERED, tmp_path, UMIM_NO_LM_EVAL="0")[1:] == [True, True]
    code = """
import sys
from lm_eval.models import MODEL_MAPPING
from lm_eval.api.registry import model_registry
out = [model_registry._objs["umim"], MODEL_MAPPING["umim"], "umim_core" in sys.modules,
       sorted(set(MODEL_MAPPING) - set(model_registry)), len(model_registry),
       "hf" in model_registry]
"""
    assert answer(code, tmp_path) == [TARGET, TARGET, False, [], count + 1, True]


def test_entry_points_have_the_form_of_lm_evals_plugin_guide() -> None:
    """Groups of the guide; a name that is no built-in; an object to load only when asked for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    groups = {k: v for k, v in project["entry-points"].items() if k.startswith("lm_eval.")}
    guide = {f"lm_eval.{kind}" for kind in ("models", "filters", "metrics", "aggregations")}
    assert groups.keys() <= guide and groups["lm_eval.models"] == {"umim": TARGET}
    from lm_eval.api.model import LM
    from lm_eval.models import MODEL_MAPPING

    [point] = [EntryPoint(n, v, "lm_eval.models") for n, v in groups["lm_eval.models"].items()]
    assert issubclass(point.load(), LM)
    assert MODEL_MAPPING.get(point.name, TARGET) == TARGET


def test_start_up_line_is_silent_where_the_module_is_missing(tmp_path: Path) -> None:
    shutil.copy(ROOT / "packaging" / "umim_lm_eval.pth", tmp_path)
    code = f"import site; site.addsitedir({str(tmp_path)!r}); print('started')"
    done = run_python(code, "-I", "-S", cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("started\n", "")


HUB = ROOT.parent / "shared" / "hub"
COMMAND = Path(sys.executable).parent / "lm_eval"
NAME = "umim-docs-llama"
FOLDERS = ("arc", "piqa")  # of lm-eval's tasks


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


@pytest.mark.skipif(not HUB.is_dir(), reason="no local copies of the stock tasks (shared/hub)")
def test_the_literal_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
