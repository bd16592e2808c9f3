"""The start-up hook: `lm_eval --model umim` with the stock lm-eval, and nothing else changed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TARGET = "umim_core.evaluation.harness:UmimLM"
SETTINGS = ("UMIM_NO_LM_EVAL", "PYTHONPATH", "PYTHONSTARTUP")


def run_python(
    code: str, *options: str, cwd: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter of this environment, outside the checkout."""
    clean = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    return subprocess.run(
        [sys.executable, *options, "-c", code],
        env=clean | environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
    )


def answer(code: str, cwd: Path, **environment: str) -> object:
    done = run_python(f"import json\n{code}\nprint(json.dumps(out))", cwd=cwd, **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_interpreter_start_loads_the_hook_and_nothing_heavy(tmp_path: Path) -> None:
    heavy = ("umim_core", "lm_eval", "torch", "numpy", "importlib.metadata")
    code = f"import sys\nout = [m for m in ('_umim_lm_eval', *{heavy!r}) if m in sys.modules]"
    assert answer(code, tmp_path) == ["_umim_lm_eval"]


def test_interpreter_start_is_not_slowed(tmp_path: Path) -> None:
    best = min(
        int(found[1])
        for _ in range(5)
        if (
            found := re.search(
                r"(\d+) \|\s+_umim_lm_eval$",
                run_python("", "-X", "importtime", cwd=tmp_path).stderr,
                re.MULTILINE,
            )
        )
    )
    assert best < 10_000  # microseconds; about 300 measured


def test_model_is_registered_lazily_beside_every_built_in(tmp_path: Path) -> None:
    code = """
import sys
from lm_eval.models import MODEL_MAPPING
from lm_eval.api.registry import model_registry
out = [model_registry._objs["umim"], MODEL_MAPPING["umim"], "umim_core" in sys.modules,
       sorted(set(MODEL_MAPPING) - set(model_registry)), len(model_registry),
       "hf" in model_registry]
"""
    built_in = answer(
        "from lm_eval.models import MODEL_MAPPING\nout = len(MODEL_MAPPING)",
        tmp_path,
        UMIM_NO_LM_EVAL="1",
    )
    assert isinstance(built_in, int) and built_in > 20
    assert answer(code, tmp_path) == [TARGET, TARGET, False, [], built_in + 1, True]


def test_stock_lookup_gives_our_class_and_theirs(tmp_path: Path) -> None:
    code = """
from lm_eval.api.registry import get_model
out = [get_model("umim").__module__ + ":" + get_model("umim").__name__, get_model("hf").__name__]
"""
    assert answer(code, tmp_path) == [TARGET, "HFLM"]


def test_lookup_works_when_a_built_in_model_was_imported_first(tmp_path: Path) -> None:
    code = """
from lm_eval.models.dummy import DummyLM
from lm_eval.api.registry import model_registry
out = ["umim" in model_registry, "hf" in model_registry]
"""
    assert answer(code, tmp_path) == [True, True]


@pytest.mark.parametrize(("value", "registered"), [("1", False), ("0", True), ("", True)])
def test_opt_out_switches_the_hook_off(tmp_path: Path, value: str, registered: bool) -> None:
    code = """
import lm_eval.models
from lm_eval.api.registry import model_registry
out = ["umim" in model_registry, "hf" in model_registry]
"""
    assert answer(code, tmp_path, UMIM_NO_LM_EVAL=value) == [registered, True]


def test_an_entry_point_that_came_first_is_kept(tmp_path: Path) -> None:
    code = """
from lm_eval.api.registry import model_registry
model_registry.register("umim", target="elsewhere:Model")
import lm_eval.models
out = [model_registry._objs["umim"], "hf" in model_registry]
"""
    assert answer(code, tmp_path) == ["elsewhere:Model", True]


def test_asking_for_the_spec_does_not_use_the_hook_up(tmp_path: Path) -> None:
    code = """
import importlib.util
assert importlib.util.find_spec("lm_eval.models")
import lm_eval.models
from lm_eval.api.registry import model_registry
out = "umim" in model_registry
"""
    assert answer(code, tmp_path) is True


def test_hook_leaves_no_finder_behind(tmp_path: Path) -> None:
    code = """
import sys
def ours():
    return sum(type(f).__name__ == "RegisterAfterImport" for f in sys.meta_path)
before = ours()
import lm_eval.models
out = [before, ours()]
"""
    assert answer(code, tmp_path) == [1, 0]


def test_another_registry_design_is_left_working_with_a_warning(tmp_path: Path) -> None:
    package = tmp_path / "lm_eval"
    for folder in (package, package / "api", package / "models"):
        folder.mkdir()
        (folder / "__init__.py").write_text("")
    (package / "api" / "registry.py").write_text("MODEL_REGISTRY = {}\n")
    done = run_python("import lm_eval.models; print('imported')", cwd=tmp_path)
    assert done.stdout == "imported\n"
    assert "lm-eval==0.4.13" in done.stderr
