"""Scores of answers: figures by hand, and the accuracy that lm-eval's model finds."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch

from support.tiny_table import write_questions
from tasks.stages.adaptation import compared
from umim_core.adaptation.choices import EncodedQuestion, encode_questions
from umim_core.backbone.backbone import Backbone, wrap_backbone
from umim_core.config.recipe import DEFAULT_TASK
from umim_core.errors import EvaluationError, NumericalError
from umim_core.evaluation.questions import ChoiceScores, evaluate_task, score_choices
from umim_core.evaluation.sizes import Sizes
from umim_core.merging.merged_model import MergedModel
from umim_core.model.umim import UMIM
from umim_core.task_sets.spec import TASKS, read_questions

BASE = ChoiceScores([[-1.0, -2.0], [-1.0, -2.0], [-3.0, -2.5]], [0, 1, 1], Sizes(16, 16, 10, 10))
OWN = ChoiceScores([[-1.0, -2.0], [-3.0, -2.0], [-2.0, -2.5]], [0, 1, 1], Sizes(16, 14, 10, 8))


def test_figures_of_a_hand_made_case() -> None:
    assert OWN.hits() == [1.0, 1.0, 0.0] and BASE.hits() == [1.0, 0.0, 1.0]
    assert OWN.margins() == [1.0, 1.0, -0.5]
    found = compared(OWN, BASE)
    assert found["token_reduction"] == pytest.approx(0.2)
    assert found["input_reduction"] == pytest.approx(2 / 16)
    assert found["accuracy"] == pytest.approx(2 / 3) and found["difference"] == 0.0
    assert found["difference_se"] == pytest.approx((2 / 2) ** 0.5 / 3**0.5)  # steps 0, 1, -1
    assert (found["gained"], found["lost"]) == (1.0, 1.0)
    assert found["margin_difference"] == pytest.approx((0.0 + 2.0 - 1.0) / 3)
    assert "difference" not in compared(BASE, None)
    tied = ChoiceScores([[-1.0, -1.0], [-1.0, -1.0]], [0, 1], Sizes(8, 8, 4, 4))
    assert tied.hits() == [1.0, 0.0] and tied.margins() == [0.0, 0.0]


@pytest.mark.parametrize("merge", ["none", "prompt"])
def test_accuracy_and_reduction_are_those_of_lm_eval(
    tiny_umim: UMIM, tiny_checkpoint: Path, tmp_path: Path, merge: str
) -> None:
    data = write_questions(tmp_path)
    form = TASKS.find(DEFAULT_TASK).form
    merged_model = tiny_umim.merged_model if merge == "prompt" else tiny_umim.merged_model.base()
    encode = merged_model.backbone.encode
    questions = encode_questions(read_questions(data / "test.jsonl"), encode, form, 60)
    expected = evaluate_task(tiny_checkpoint, merge=merge, data=data)  # type: ignore[arg-type]
    for batch in (1, 3):
        found = score_choices(questions, merged_model, batch)
        assert sum(found.hits()) / len(found.golds) == pytest.approx(expected["acc_tok"])
        if merge == "prompt":
            reduction = found.total.context_token_reduction
            assert 0 < reduction == pytest.approx(expected["context_token_reduction"])
        else:
            assert found.total.context_token_reduction == 0.0


def test_what_has_no_score_is_refused(tiny_llama: Backbone) -> None:
    broken = copy.deepcopy(tiny_llama.model)
    backbone = wrap_backbone(broken, tiny_llama.tokenizer, name="broken")
    with torch.no_grad():
        broken.get_output_embeddings().weight[7] = float("nan")
    merged_model = MergedModel(backbone, None, None)
    question = EncodedQuestion(np.array([1, 2]), (np.array([3]), np.array([4])), 0)
    with pytest.raises(EvaluationError, match="a task must have questions"):
        score_choices([], merged_model, 1)
    with pytest.raises(NumericalError, match="every log-probability must be finite"):
        score_choices([question], merged_model, 1)
