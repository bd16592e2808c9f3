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
from typing import Any

import lm_eval.tasks
import pytest
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from support.harness_files import write_data_set
from support.processes import run_command
from umim_core.embedded.assets import embedded_path
from umim_core.evaluation.harness import UmimLM

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


ESSAYS = "The old cat sat on the mat near the sea. A dog came by the log. Nobody knew why it sat. "


def run(file: str, metadata: dict[str, Any]) -> dict[str, Any]:
    """Evaluate the task of one of lm-eval's own files, on two questions."""
    (folder,) = lm_eval.tasks.__path__
    manager = TaskManager(include_defaults=False, metadata=metadata)
    model = UmimLM(NAME, merge="prompt", raw_tail=16, dtype="float32", device="cpu", batch_size=2)
    found = simple_evaluate(
        model, tasks=[str(Path(folder) / file)], task_manager=manager, limit=2, bootstrap_iters=0,
        gen_kwargs={"max_gen_toks": 4},
    )  # fmt: skip
    assert found is not None
    ((task, results),) = found["results"].items()
    assert len(next(iter(found["samples"].values()))) == 2
    return {**results, **model.get_model_info()["umim"]["tasks"][task]}


@pytest.mark.parametrize("task", ["niah_single_1", "niah_multivalue"])
def test_ruler_runs(task: str, local_hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("wonderwords", "nltk"):
        pytest.importorskip(module, reason="RULER needs lm_eval[ruler]")
    monkeypatch.setenv("LOCAL_RANK", "1")  # nltk's data are not fetched
    ruler = importlib.import_module("lm_eval.tasks.ruler.prepare_niah")
    monkeypatch.delenv("LOCAL_RANK")
    from nltk.tokenize.punkt import PunktSentenceTokenizer

    essays = {"train": [{"text": ESSAYS * 60}]}
    write_data_set(local_hub, "baber/paul_graham_essays", "default", essays)
    ruler.get_haystack.cache_clear()
    ruler.cached_sent_tokenize.cache_clear()
    monkeypatch.setattr(ruler, "sent_tokenize", PunktSentenceTokenizer().tokenize)
    backbone = embedded_path(NAME, "backbone")
    found = run(f"ruler/{task}.yaml", {"tokenizer": str(backbone), "max_seq_lengths": [1024]})
    assert 0 <= found["1024,none"] <= 1
    assert 0.02 < found["context_token_reduction"] < 0.75


def test_longbench_runs(local_hub: Path) -> None:
    for module in ("jieba", "fuzzywuzzy", "rouge"):
        pytest.importorskip(module, reason="LongBench needs lm_eval[longbench]")
    row = {"context": ESSAYS * 20, "question": "Why?", "answers": ["Nobody knew why."]}
    write_data_set(local_hub, "Xnhyacinth/LongBench", "qmsum", {"test": [row] * 3})
    found = run("longbench/qmsum.yaml", {})
    assert 0 <= found["rouge_score,none"] <= 1
    assert 0.02 < found["context_token_reduction"] < 0.75
