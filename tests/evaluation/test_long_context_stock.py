"""lm-eval's own RULER and LongBench tasks run with ``--model umim`` as they are, on local data."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import lm_eval.tasks
import pytest
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from support.harness_files import write_data_set
from umim_core.embedded.assets import embedded_path
from umim_core.evaluation.harness import UmimLM

ESSAYS = "The old cat sat on the mat near the sea. A dog came by the log. Nobody knew why it sat. "
MODEL = "umim-docs-llama"


def run(file: str, metadata: dict[str, Any]) -> dict[str, Any]:
    """Evaluate the task of one of lm-eval's own files, on two questions."""
    (folder,) = lm_eval.tasks.__path__
    manager = TaskManager(include_defaults=False, metadata=metadata)
    model = UmimLM(MODEL, merge="prompt", raw_tail=16, dtype="float32", device="cpu", batch_size=2)
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
    backbone = embedded_path(MODEL, "backbone")
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
