from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("lm_eval", reason="lm-eval is the `eval` extra")

from tests.evaluation.conftest import oracle_context
from umim_core.embedded.documents import write_rows
from umim_core.evaluation.harness import UmimLM
from umim_core.evaluation.questions import evaluate_task


def write_task(folder: Path) -> None:
    rows = [
        {"id": str(i), "context": f"the {w} sat on the mat", "choices": ["the cat", w], "gold": 1}
        for i, w in enumerate(["dog", "sea", "log", "house"])
    ]
    for split in ("train", "valid", "test"):
        write_rows(folder / f"{split}.jsonl", rows)


@pytest.mark.parametrize("merge", ["prompt", "all", "none"])
def test_the_embedded_task_runs_through_lm_eval(
    checkpoint_path: Path, tmp_path: Path, merge: str
) -> None:
    write_task(tmp_path)
    result = evaluate_task(
        checkpoint_path, merge=merge, data=tmp_path, limit=3, batch_size=4, device="cpu"
    )
    assert result["questions"] == 3
    assert (result["token_reduction"] > 0) == (merge != "none")
    assert {"acc", "acc_norm", "acc_tok", "acc_stderr"} <= set(result)


def test_accuracy_per_token_agrees_with_an_oracle(checkpoint_path: Path, tmp_path: Path) -> None:
    write_task(tmp_path)
    result = evaluate_task(checkpoint_path, data=tmp_path, device="cpu", batch_size=3)
    model = UmimLM(str(checkpoint_path), dtype="float32", device="cpu")
    hits = []
    for line in (tmp_path / "test.jsonl").read_text("utf-8").splitlines():
        row = json.loads(line)
        prompt = row["context"] + "\n\nSummary:"
        pairs = [model._encode_pair(prompt, " " + choice) for choice in row["choices"]]
        means = [oracle_context(model.scorer.merged_model, *pair) / len(pair[1]) for pair in pairs]
        hits.append(int(np.argmax(means)) == row["gold"])
    assert result["acc_tok"] == pytest.approx(np.mean(hits))
