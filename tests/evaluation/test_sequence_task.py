"""The paper's accuracy: mean log-likelihood of prompt and answer as one sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval", reason="lm-eval is the `eval` extra")

import lm_eval.tasks
from datasets import Dataset, DatasetDict
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from support.harness_files import write_data_set
from tests.evaluation.conftest import byte_tokenizer
from umim_core.evaluation import tasks
from umim_core.evaluation.harness import UmimLM
from umim_core.evaluation.questions import evaluate_task
from umim_core.evaluation.tasks.lm_eval_tasks import SequenceTask, load_tasks, run_task

CHOICES = ["sat on the mat", "near the old cat house by the sea"]


Rows = list[dict[str, object]]
ROWS: Rows = [
    {"text": f"the {word}", "choices": CHOICES, "gold": gold}
    for word, gold in (("cat", 0), ("dog and the old log", 1), ("sea", 1), ("mat", 0))
]


def config(rows: Rows) -> dict[str, Any]:
    return {
        "task": "umim_own",
        "class": SequenceTask,
        "custom_dataset": lambda **_: DatasetDict({"test": Dataset.from_list(rows)}),
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "text",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
    }


def run(model: HFLM, rows: Rows = ROWS) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    (task,) = load_tasks([config(rows)]).values()
    assert isinstance(task, SequenceTask)
    task.tokenizer = model.tokenizer
    return run_task(model, task)


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


def test_one_forward_over_the_sequence_gives_the_scores(backbone_path: Path) -> None:
    settings = {"dtype": "float32", "device": "cpu", "add_bos_token": True}
    model = HFLM(pretrained=str(backbone_path), batch_size=2, **settings)
    found, samples = run(model)
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
    checkpoint_path: Path, backbone_path: Path
) -> None:
    own = UmimLM(str(checkpoint_path), "none", dtype="float32", device="cpu", batch_size=3)
    stock = HFLM(pretrained=str(backbone_path), dtype="float32", device="cpu", batch_size=3)
    (found, samples), (wanted, right) = run(own), run(stock)
    assert found == wanted
    for sample, other in zip(samples, right, strict=True):
        assert sample["filtered_resps"] == other["filtered_resps"]


def test_merged_parts_add_up_to_the_merged_sequence(checkpoint_path: Path) -> None:
    prompt = "<|endoftext|>the cat"  # the prefix token, as a chat template may write it
    row: dict[str, object] = {"text": prompt, "choices": CHOICES, "gold": 0}
    model = UmimLM(str(checkpoint_path), "all", dtype="float32", device="cpu", batch_size=3)
    _, (sample,) = run(model, [row])
    assert model.token_reduction > 0.05
    *answers, (alone, _, tokens) = sample["filtered_resps"]
    requests = [Instance("loglikelihood", {}, ("", f"{prompt} {text}"), 0) for text in CHOICES]
    whole = model.loglikelihood(requests, disable_tqdm=True)
    sums = [alone + score for score, _, _ in answers]
    assert sums == pytest.approx([score for score, _ in whole], abs=1e-4)
    assert tokens == len(model.tok_encode(prompt)) - 1


COPA = [
    {"premise": f"The {word} was here.", "choice1": f"A{first}", "choice2": f"I{second}",
     "question": "effect", "label": gold}
    for (word, gold), (first, second) in zip(
        (("cat", 0), ("dog", 1)), ((" sat on it.", " went."), (" log.", " sat near.")), strict=True
    )
]  # fmt: skip
PIQA = [{"goal": "see the cat", "sol1": "sit on the log", "sol2": "by the sea", "label": 1}]


@pytest.fixture
def hub(local_hub: Path) -> Path:
    """The hub with the data sets of these tests."""
    splits = ("train", "validation")
    write_data_set(local_hub, "aps/super_glue", "copa", dict.fromkeys(splits, COPA))
    write_data_set(local_hub, "baber/piqa", "default", dict.fromkeys(splits, PIQA))
    return local_hub


@pytest.mark.parametrize("model", ["hf", "umim"])
def test_a_task_asks_what_lm_evals_own_asks_and_the_prompt_alone(
    model: str, checkpoint_path: Path, backbone_path: Path, hub: Path
) -> None:
    named = {"pretrained": backbone_path} if model == "hf" else {"checkpoint": checkpoint_path}
    options = {name: str(path) for name, path in named.items()}
    (folder,) = tasks.__path__
    manager = TaskManager(include_path=folder, include_defaults=False, metadata=options)
    (place,) = lm_eval.tasks.__path__
    stock = Path(place) / "piqa" / "piqa.yaml"
    asked = []
    for name in (str(stock), "umim_piqa"):
        ((_, task),) = manager.load([name])["tasks"].items()
        task.set_config("num_fewshot", 0)
        task.build_all_requests()
        asked.append([request.args for request in task.instances])
    own = asked[1]
    assert [args for args in own if args[0]] == asked[0]
    assert own[2] == ("", "Question: see the cat\nAnswer:")
    for request in task.instances:
        request.resps = [(-1.0, False)]
    task.apply_filters()
    lengths = [request.filtered_resps["none"][2] for request in task.instances[:3]]
    assert lengths[2] == len(byte_tokenizer()(own[2][1])["input_ids"])


def test_every_accuracy_stands_beside_the_others(checkpoint_path: Path, hub: Path) -> None:
    settings: dict[str, Any] = {"device": "cpu", "batch_size": 4}
    result = evaluate_task(checkpoint_path, task="umim_copa", **settings)
    assert 0 <= result["acc_seq"] <= 1 and result["acc_seq_stderr"] >= 0
    assert {"acc", "acc_norm", "acc_tok"} <= result.keys()
    assert result["questions"] == 2 and result["context_token_reduction"] >= 0


def test_an_answer_given_as_text_counts_and_has_one_blank(checkpoint_path: Path, hub: Path) -> None:
    task = load_tasks(["umim_copa"])["umim_copa"]
    task.build_all_requests()
    assert task.instances[1].args == ("The cat was here therefore", " i went.")
    doc = task.eval_docs[1]
    worse, better = (-9.0, False, 2), (-1.0, False, 2)
    for scores, right in (([worse, better], 1.0), ([better, worse], 0.0)):
        assert task.process_results(doc, [*scores, (-1.0, False, 3)])["acc_seq"] == right
