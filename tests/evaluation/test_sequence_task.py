"""The paper's accuracy: mean log-likelihood of prompt and answer as one sequence."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval", reason="lm-eval is the `eval` extra")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from umim_core.evaluation import tasks
from umim_core.evaluation.harness import UmimLM
from umim_core.evaluation.multiple_choice import evaluate_task
from umim_core.evaluation.tasks.sequence_task import SequenceTask
from umim_core.evaluation.tasks.spec_task import lm_eval_config
from umim_core.evaluation.tasks.task_runs import load_tasks, run_task
from umim_core.task_sets.spec import TASKS

CHOICES = ["sat on the mat", "near the old cat house by the sea"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    rows = [
        {"id": word, "context": f"the {word}", "choices": CHOICES, "gold": gold}
        for word, gold in (("cat", 0), ("dog and the old log", 1), ("sea", 1), ("mat", 0))
    ]
    (folder / "copa.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    return folder


def run(model: HFLM, data: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    config = lm_eval_config(TASKS.find("umim_copa"))
    (task,) = load_tasks([config], {"task_data": str(data)}).values()
    assert isinstance(task, SequenceTask)
    task.tokenizer = model.tokenizer
    return run_task(model, task, None)


def whole_sequence_means(model: HFLM, sample: dict[str, Any]) -> list[float]:
    """Score prompt and answer in one forward behind the BOS token."""
    means = []
    for context, answer in sample["arguments"][:-1]:
        ids = model.tokenizer(context + answer, add_special_tokens=False)["input_ids"]
        rows = torch.tensor([[model.prefix_token_id, *ids]])
        with torch.no_grad():
            logits = model.model(rows).logits[0, :-1].double().log_softmax(-1)
        means.append(float(logits[torch.arange(len(ids)), torch.tensor(ids)].mean()))
    return means


def test_one_forward_over_the_sequence_gives_the_scores(backbone_path: Path, data: Path) -> None:
    settings = {"dtype": "float32", "device": "cpu", "add_bos_token": True}
    model = HFLM(pretrained=str(backbone_path), batch_size=2, **settings)
    found, samples = run(model, data)
    hits = []
    for sample in samples:
        *answers, (prompt, _, tokens) = sample["filtered_resps"]
        means = [(prompt + score) / (tokens + length) for score, _, length in answers]
        wanted = whole_sequence_means(model, sample)
        assert means == pytest.approx(wanted, abs=1e-5)
        hits.append(wanted.index(max(wanted)) == sample["target"])
    assert found["acc_seq,none"] == sum(hits) / len(hits)
    assert {"acc,none", "acc_norm,none"} <= found.keys()


def test_without_merging_it_equals_lm_evals_own_model(
    checkpoint_path: Path, backbone_path: Path, data: Path
) -> None:
    own = UmimLM(str(checkpoint_path), "none", dtype="float32", device="cpu", batch_size=3)
    stock = HFLM(pretrained=str(backbone_path), dtype="float32", device="cpu", batch_size=3)
    (found, samples), (wanted, right) = run(own, data), run(stock, data)
    assert found == wanted
    for sample, other in zip(samples, right, strict=True):
        assert sample["filtered_resps"] == other["filtered_resps"]


def test_merged_parts_add_up_to_the_merged_sequence(checkpoint_path: Path, tmp_path: Path) -> None:
    prompt = "<|endoftext|>the cat"  # the prefix token, as a chat template may write it
    row = {"context": prompt, "choices": CHOICES, "gold": 0}
    (tmp_path / "copa.jsonl").write_text(json.dumps(row), "utf-8")
    model = UmimLM(str(checkpoint_path), "all", dtype="float32", device="cpu", batch_size=3)
    _, (sample,) = run(model, tmp_path)
    assert model.token_reduction > 0.05
    *answers, (alone, _, tokens) = sample["filtered_resps"]
    requests = [Instance("loglikelihood", {}, ("", f"{prompt} {text}"), 0) for text in CHOICES]
    whole = model.loglikelihood(requests, disable_tqdm=True)
    sums = [alone + score for score, _, _ in answers]
    assert sums == pytest.approx([score for score, _ in whole], abs=1e-4)
    assert tokens == len(model.tok_encode(prompt)) - 1


def test_every_accuracy_stands_beside_the_others(
    checkpoint_path: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UMIM_TASK_DATA", str(data))
    task = TASKS.find("umim_copa")
    task.write(tmp_path, None, None)
    settings: dict[str, Any] = {"data": tmp_path, "device": "cpu", "batch_size": 4}
    result = evaluate_task(checkpoint_path, task="umim_copa", **settings)
    monkeypatch.setitem(TASKS._found, "umim_copa", replace(task, metrics=("acc",)))
    without = evaluate_task(checkpoint_path, task="umim_copa", **settings)
    assert 0 <= result.acc_seq <= 1 and result.acc_seq_stderr >= 0
    assert "acc_seq" not in without.metrics()
    assert result.token_reduction > 0
    reductions = ("token_reduction", "context_token_reduction")  # of answers, not of the prompt
    for name in ("acc", "acc_norm", "acc_tok", "questions", *reductions):
        assert result.metrics()[name] == without.metrics()[name]


@pytest.mark.parametrize("model", ["hf", "umim"])
def test_the_command_finds_task_and_tokenizer_by_name(
    model: str, checkpoint_path: Path, backbone_path: Path, data: Path
) -> None:
    named = {"pretrained": backbone_path} if model == "hf" else {"checkpoint": checkpoint_path}
    options = {name: str(path) for name, path in (named | {"task_data": data}).items()}
    (folder,) = tasks.__path__
    manager = TaskManager(include_path=folder, include_defaults=False, metadata=options)
    task = manager.load(["umim_copa"])["tasks"]["umim_copa"]
    task.set_config("num_fewshot", 0)
    task.build_all_requests()
    assert [request.args for request in task.instances[:3]] == [
        ("the cat", f" {CHOICES[0]}"),
        ("the cat", f" {CHOICES[1]}"),
        ("", "the cat"),
    ]
    for request in task.instances:
        request.resps = [(-1.0, False)]
    task.apply_filters()
    lengths = [request.filtered_resps["none"][2] for request in task.instances[:3]]
    assert lengths[0] < lengths[1] and lengths[2] == 2


def test_every_task_has_a_file_for_lm_evals_command() -> None:
    (folder,) = tasks.__path__
    assert set(TASKS.names()) <= {path.stem for path in Path(folder).glob("*.yaml")}
