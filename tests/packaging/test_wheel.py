"""The wheel: what is in it, and that the stock lm-eval finds it in an environment of its own."""

from __future__ import annotations

import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.processes import ROOT, output_of

HUB = ROOT.parent / "shared" / "hub"
ASSETS = ("*.json", "*.md", "*.npy", "*.parquet", "*.safetensors")

# No packaged model is there: the default checkpoint is the embedded one.
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "UMIM_MODELS": "/nonexistent"}


def run(*command: object, cwd: Path = ROOT) -> str:
    without = ("PYTHONPATH", "VIRTUAL_ENV")
    return output_of(*command, cwd=cwd, seconds=1800, without=without, **OFFLINE)


def built(kind: str, out: Path) -> Path:
    """Return a wheel of the checkout, by the hook that pip calls; to pack it takes most time."""
    stored = "import zlib; zlib.Z_DEFAULT_COMPRESSION = zlib.Z_NO_COMPRESSION"
    code = f"{stored}; from hatchling.build import *; build_{kind}({str(out)!r})"
    run(sys.executable, "-c", code)
    (wheel,) = out.glob("umim-*-py3-none-any.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("wheel", tmp_path_factory.mktemp("wheel"))


def test_wheel_holds_the_library_with_every_asset_and_the_start_up_hook_only(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.partition("/")[0] for name in names}
    (info,) = (top for top in tops if top.endswith(".dist-info"))
    assert tops == {"umim_core", "_umim_lm_eval.py", "umim_lm_eval.pth", info}
    assert not [name for name in names if "__pycache__" in name]
    assets = ROOT / "umim_core" / "embedded" / "assets"
    wanted = {p for pattern in ASSETS for p in assets.rglob(pattern)}
    wanted |= set((ROOT / "umim_core" / "evaluation" / "tasks").glob("*.yaml"))
    wanted.add(ROOT / "umim_core" / "py.typed")
    assert any(p.suffix == ".safetensors" for p in wanted)
    assert {p.relative_to(ROOT).as_posix() for p in wanted} <= names


def test_wheel_declares_the_command_and_the_model(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (n for n in archive.namelist() if n.endswith("entry_points.txt"))
    declared = archive.read(name).decode()
    assert "umim = umim_core.cli.app:main" in declared
    assert re.search(
        r"\[lm_eval\.models\]\s+umim = umim_core\.evaluation\.harness:UmimLM", declared
    )


def test_editable_wheel_holds_the_start_up_hook(tmp_path: Path) -> None:
    archive = zipfile.ZipFile(built("editable", tmp_path))
    for name in ("_umim_lm_eval.py", "umim_lm_eval.pth"):
        assert archive.read(name) == (ROOT / "packaging" / name).read_bytes()


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Scripts folder of a new environment with the wheel, extra eval and nothing else.

    The dependencies are those that the wheel declares, at the locked versions: what a user gets.
    """
    folder = tmp_path_factory.mktemp("clean")
    scripts = folder / "env" / "bin"
    lock = (ROOT / "requirements" / "lock.txt").read_text(encoding="utf-8")
    pins = re.findall(r"^[A-Za-z0-9._-]+==\S+", lock, re.MULTILINE)
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(pins) + "\n", encoding="utf-8")
    run(sys.executable, "-m", "venv", folder / "env")
    pip = [scripts / "python", "-m", "pip", "install", "--quiet", "--constraint", constraints]
    run(*pip, "--requirement", ROOT / "requirements" / "torch.txt")
    torch = ["--constraint", ROOT / "requirements" / "torch.txt"]
    run(*pip, *torch, f"{wheel}[eval]", cwd=folder)
    yield scripts


def lm_eval(scripts: Path, *arguments: str) -> dict[str, float]:
    """Run the stock command from the local hub; return task -> accuracy from its table."""
    if not HUB.is_dir():
        pytest.skip("../shared/hub is absent: no local copy of the stock tasks")
    done = run(scripts / "lm_eval", *arguments, "--limit", "50", cwd=HUB)
    rows = re.findall(r"\|\s*(\w+)\s*\|[^\n]*\|acc\s*\|[^|]*\|\s*([\d.]+)\|", done)
    return {task: float(value) for task, value in rows}


@pytest.mark.full
def test_clean_environment_imports_the_installed_library_without_orchestration(clean: Path) -> None:
    run(clean / "python", "-m", "pip", "check")
    code = "import umim_core, _umim_lm_eval, sys; print(umim_core.__file__, _umim_lm_eval.__file__)"
    for file in run(clean / "python", "-c", code, cwd=clean).split():
        assert Path(file).is_relative_to(clean.parent)
    found = run(clean / "python", "-m", "pip", "list", "--format=freeze").lower()
    assert not re.search(r"^(ray|prefect|mlflow|deepspeed)==", found, re.MULTILINE)
    run(clean / "python", "-c", "from umim_core import UMIM", cwd=clean)


@pytest.mark.full
def test_literal_lm_eval_command_works(clean: Path) -> None:
    accuracy = lm_eval(clean, "--model", "umim", "--tasks", "arc_easy,piqa")
    assert set(accuracy) == {"arc_easy", "piqa"}
    assert all(0.0 < value < 1.0 for value in accuracy.values())


@pytest.mark.full
def test_built_in_models_still_work_and_agree_without_merging(clean: Path) -> None:
    code = (
        "from umim_core.embedded.assets import embedded_path;"
        "print(embedded_path('umim-docs-llama', 'backbone'))"
    )
    backbone = run(clean / "python", "-c", code, cwd=clean).strip()
    tasks = ("--tasks", "arc_easy,piqa")
    theirs = lm_eval(clean, "--model", "hf", "--model_args", f"pretrained={backbone}", *tasks)
    ours = lm_eval(clean, "--model", "umim", "--model_args", "merge=none", *tasks)
    assert set(theirs) == {"arc_easy", "piqa"}
    assert ours == theirs
