from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is the `eval` extra")

from lm_eval.evaluator import evaluate

from umim_core.evaluation.harness import UmimLM
from umim_core.evaluation.tasks.lm_eval_tasks import load_tasks
from umim_core.evaluation.text_metrics.code_tests import code_tests

ROW = {
    "task_id": "add",
    "prompt": 'def add(a, b):\n    """Add two numbers."""\n',
    "entry_point": "add",
    "test": "def check(candidate):\n    assert candidate(2, 3) == 5\n",
    "canonical_solution": "    return a + b\n",
}


def test_an_answer_is_right_if_its_function_passes_the_tests() -> None:
    answers = [ROW["canonical_solution"], "    return a - b\n", "    return a +", "    return 5\n"]
    assert code_tests(answers, ROW) == {"pass@1": 0.5, "pass@4": 1.0}


def test_code_is_run_only_when_lm_evals_command_confirms_it(
    checkpoint_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = tmp_path / "openai" / "openai_humaneval"
    hub.mkdir(parents=True)
    (hub / "test.jsonl").write_text(json.dumps(ROW), "utf-8")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    task = load_tasks(["umim_humaneval"])["umim_humaneval"]
    task.set_config("repeats", 4)
    task.set_config("generation_kwargs", task.get_config("generation_kwargs") | {"max_gen_toks": 2})
    loaded: Any = {"tasks": {"umim_humaneval": task}, "groups": {}, "group_map": {}}
    model = UmimLM(str(checkpoint_path), "none", device="cpu", batch_size=4, max_length=256)
    with pytest.raises(ValueError, match="unsafe"):
        evaluate(lm=model, task_dict=loaded, bootstrap_iters=0)
    found = evaluate(lm=model, task_dict=loaded, bootstrap_iters=0, confirm_run_unsafe_code=True)
    assert found is not None
    (sample,) = found["samples"]["umim_humaneval"]
    assert len(sample["filtered_resps"][0]) == 4
    assert found["results"]["umim_humaneval"]["pass@1,none"] == 0.0
    assert found["results"]["umim_humaneval"]["pass@4,none"] == 0.0
