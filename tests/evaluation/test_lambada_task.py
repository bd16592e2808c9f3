"""LAMBADA: the last word after its passage."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("lm_eval", reason="lm-eval is the `eval` extra")

from lm_eval.tasks import TaskManager

from umim_core.errors import CorpusError
from umim_core.evaluation import tasks
from umim_core.evaluation.harness import UmimLM
from umim_core.evaluation.tasks.lambada_task import LAMBADA, load_passages
from umim_core.evaluation.tasks.task_runs import run_task

PASSAGES = ("the cat sat on the mat", "the dog sat on the log near the sea", "the old cat")


def write(folder: Path, *lines: object) -> Path:
    text = "\n".join(json.dumps(line) for line in lines)
    (folder / "lambada_test.jsonl").write_text(text, "utf-8")
    return folder


def test_accuracy_and_perplexity_are_those_of_the_last_words(
    checkpoint_path: Path, tmp_path: Path
) -> None:
    (folder,) = tasks.__path__
    options = {"task_data": str(write(tmp_path, *({"text": text} for text in PASSAGES)))}
    manager = TaskManager(include_path=folder, include_defaults=False, metadata=options)
    task = manager.load([LAMBADA])["tasks"][LAMBADA]
    task.set_config("num_fewshot", 0)
    model = UmimLM(str(checkpoint_path), "none", dtype="float32", device="cpu", batch_size=2)
    found, _ = run_task(model, task, None)
    totals, hits = [], []
    for text in PASSAGES:
        given = len(model.tok_encode(text.rpartition(" ")[0]))
        ids = torch.tensor(model.tok_encode(text))
        with torch.no_grad():
            logits = model.model(ids[None]).logits[0, given - 1 : -1].double().log_softmax(-1)
        word = ids[given:]
        totals.append(float(logits[torch.arange(len(word)), word].sum()))
        hits.append(bool((logits.argmax(-1) == word).all()))
    assert found["perplexity,none"] == pytest.approx(math.exp(-sum(totals) / len(totals)), rel=1e-5)
    assert found["acc,none"] == pytest.approx(sum(hits) / len(hits))


def test_folder_and_hub_give_the_same_passages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UMIM_TASK_DATA", raising=False)
    folder = write(tmp_path, *({"text": text} for text in PASSAGES))
    hub = tmp_path / "EleutherAI/lambada_openai/default"
    hub.mkdir(parents=True)
    (hub / "test.jsonl").write_text((folder / "lambada_test.jsonl").read_text("utf-8"), "utf-8")
    (hub.parent / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n"
        "  - split: test\n    path: default/test.jsonl\n---\n"
    )
    rows = load_passages(str(folder))["test"].to_list()
    monkeypatch.chdir(tmp_path)
    assert load_passages()["test"].to_list() == rows
    assert rows[0] == {"context": "the cat sat on the", "word": " mat"}


@pytest.mark.parametrize(
    "line", [{"text": "word"}, {"text": "ends in a blank "}, {"passage": "a b"}]
)
def test_a_row_without_a_last_word_is_refused_by_its_place(tmp_path: Path, line: object) -> None:
    with pytest.raises(CorpusError, match=r"lambada_test.jsonl:2 must hold a text"):
        load_passages(str(write(tmp_path, {"text": "fine here"}, line)))


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="must hold passages"):
        load_passages(str(write(tmp_path)))
