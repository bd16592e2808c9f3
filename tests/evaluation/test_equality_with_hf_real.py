"""SmolLM2-135M on stock tasks: ``merge=none`` answers as lm-eval's own ``hf`` model does.

pytest tests/evaluation/test_equality_with_hf_real.py -m full

``UMIM_EQUALITY_QUESTIONS`` (100) is the number of questions, ``UMIM_EQUALITY_PAGES`` (10) that of
pages of WikiText-2, whose test split has 60.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("lm_eval", reason="lm-eval is the `eval` extra")

from lm_eval import evaluator
from lm_eval.api.model import LM
from lm_eval.api.task import Task
from lm_eval.models.huggingface import HFLM

from umim_core.backbone.backbone import Backbone, load_backbone
from umim_core.backbone.tokenizer_files import resolve_backbone
from umim_core.evaluation.harness import UmimLM
from umim_core.evaluation.tasks.task_runs import load_tasks
from umim_core.packages.model_cache import model_fault
from umim_core.packages.packaged_model import PACKAGED

HUB = Path(__file__).resolve().parents[3] / "shared" / "hub"
MODEL = "smollm2-135m-instruct"
CHOICES = ("arc_easy", "arc_challenge", "piqa", "openbookqa", "hellaswag", "copa")
LIMIT = int(os.environ.get("UMIM_EQUALITY_QUESTIONS", "100"))
PAGES = int(os.environ.get("UMIM_EQUALITY_PAGES", "10"))  # 58,000 tokens; all are 312,000
LENGTH = 1024  # longest input: lm-eval holds all logits of a batch, 1.6 GB of eight such rows
TOLERANCE = 1e-4  # nats, float32

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(7200),
    pytest.mark.skipif(not HUB.is_dir(), reason="no local copies of the stock tasks (shared/hub)"),
]


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    if fault := model_fault(PACKAGED.find(MODEL)):
        pytest.skip(f"{fault}; umim fetch {MODEL}")
    return load_backbone(MODEL, dtype="float32", local_files_only=True)


@pytest.fixture(autouse=True)
def at_the_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    with chdir(HUB):  # copies are found by paths that equal the hub's names
        yield


def amount(task: str) -> tuple[str, int]:
    """How much of a task is read, and the variable that says so."""
    if task == "wikitext":
        return "UMIM_EQUALITY_PAGES", PAGES
    return "UMIM_EQUALITY_QUESTIONS", LIMIT


def samples(model: LM, loaded: dict[str, Task], chat: bool) -> list[dict[str, Any]]:
    [task] = loaded
    found = evaluator.evaluate(
        lm=model,
        task_dict={"tasks": loaded, "groups": {}, "group_map": {}},
        limit=amount(task)[1],
        bootstrap_iters=0,
        apply_chat_template=chat,
    )
    rows: list[dict[str, Any]] = found["samples"][task]
    return sorted(rows, key=lambda row: int(row["doc_id"]))


def both(
    backbone: Backbone, task: str, batch_size: int, chat: bool = False
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Samples of ``merge=none`` and of lm-eval's own model, loaded by itself."""
    loaded = load_tasks([task])  # once: lm-eval reads its whole index of tasks
    variable, wanted = amount(task)
    if wanted > (there := len(loaded[task].eval_docs)):
        pytest.fail(f"{variable} must be at most {there}, all of {task}; got {wanted}")
    ours = UmimLM(merge="none", backbone=backbone, batch_size=batch_size, max_length=LENGTH)
    theirs = HFLM(
        resolve_backbone(MODEL),
        dtype="float32",
        device="cpu",
        batch_size=batch_size,
        max_length=LENGTH,
    )
    found = samples(ours, loaded, chat), samples(theirs, loaded, chat)
    assert [row["doc_hash"] for row in found[0]] == [row["doc_hash"] for row in found[1]]
    return found


@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize("task", CHOICES)
def test_choices_and_log_likelihoods_are_those_of_hf(
    backbone: Backbone, task: str, batch_size: int
) -> None:
    ours, theirs = both(backbone, task, batch_size)
    assert len(ours) == LIMIT
    for own, other in zip(ours, theirs, strict=True):
        mine, base = ([pair[0] for pair in row["filtered_resps"]] for row in (own, other))
        assert mine == pytest.approx(base, abs=TOLERANCE)
        assert np.argmax(mine) == np.argmax(base)
        assert own["acc"] == other["acc"]


@pytest.mark.parametrize("batch_size", [1, 8])
def test_whole_texts_have_the_log_likelihoods_of_hf(backbone: Backbone, batch_size: int) -> None:
    ours, theirs = both(backbone, "wikitext", batch_size)
    mine, base = ([row["filtered_resps"][0] for row in rows] for rows in (ours, theirs))
    assert len(mine) == PAGES
    assert mine == pytest.approx(base, abs=TOLERANCE)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("batch_size", [1, 8])
def test_generated_answers_are_those_of_hf(backbone: Backbone, batch_size: int, chat: bool) -> None:
    ours, theirs = both(backbone, "arc_challenge_chat", batch_size, chat)
    assert len(ours) == LIMIT
    for own, other in zip(ours, theirs, strict=True):
        assert own["arguments"] == other["arguments"]
        assert (own["resps"], own["exact_match"]) == (other["resps"], other["exact_match"])
