"""Training jobs: the unit positions reach objective, start and checkpoint."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from support.merged_models import fresh_model, placed
from support.tiny_jobs import tiny_job
from support.tiny_models import save_with_tokenizer
from umim_core.adaptation.choices import encode_questions
from umim_core.adaptation.preference import ending_scores, preference_loss
from umim_core.backbone.backbone import Backbone, load_backbone
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.config.form import ModuleForm, UnitPositions
from umim_core.config.recipe import DistillConfig, PreferenceConfig
from umim_core.errors import ConfigError
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet
from umim_core.task_sets.spec import QuestionForm, read_questions
from umim_core.training.token_rows import TokenRows
from umim_core.training.train_job import TrainJob, make_objective, start_model

ROWS = [[8, 1, 2, 9, 10, 3, 4, 5, 11, 12], [1, 2, 9, 8, 7, 3, 4, 5, 1, 2]]


@pytest.fixture(scope="module")
def job(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_llama: Backbone,
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> TrainJob:
    folder = tmp_path_factory.mktemp("job")
    save_with_tokenizer(folder, tiny_llama, tiny_tokenizer)
    TokenRows.of_rows(ROWS, [10, 10]).save(folder / "rows")
    return tiny_job(folder, 10, DistillConfig(max_steps=1, bf16=False), rules="")


@pytest.fixture(scope="module")
def backbone(job: TrainJob) -> Backbone:
    return load_backbone(job.backbone)


def saved(backbone: Backbone, folder: Path, unit_positions: UnitPositions) -> Path:
    model = fresh_model(backbone, [(1, 2), (3, 4, 5)], 0.5, 1, unit_positions)
    Checkpoint.of(model).save(folder / unit_positions)
    return folder / unit_positions


def losses(job: TrainJob, backbone: Backbone) -> list[float]:
    """Return the loss of the first batch by what the job says, then by either policy."""
    matcher = Matcher(RuleSet.from_spans([(1, 2), (3, 4, 5)]))
    model = start_model(job, backbone, matcher)
    policies: tuple[UnitPositions, ...] = (model.unit_positions, "compact", "preserved")
    return [make_objective(job, placed(model, policy))([0, 1]).total.item() for policy in policies]


def test_a_fresh_module_is_trained_with_the_positions_of_its_cell(
    job: TrainJob, backbone: Backbone
) -> None:
    form = ModuleForm(unit_positions="preserved")
    found, compact, preserved = losses(replace(job, form=form), backbone)
    assert found == preserved
    assert abs(preserved - compact) > 1e-4
    assert losses(job, backbone)[0] == compact


def test_adaptation_goes_on_with_the_positions_of_its_start(
    job: TrainJob, backbone: Backbone, tmp_path: Path
) -> None:
    started = replace(job, start=str(saved(backbone, tmp_path, "preserved")))
    found, compact, preserved = losses(started, backbone)
    assert found == preserved
    assert abs(preserved - compact) > 1e-6


def test_adaptation_keeps_the_rows_of_the_rules_that_stay(
    job: TrainJob, backbone: Backbone, tmp_path: Path, torch_rng: torch.Generator
) -> None:
    rowed = replace(job, form=ModuleForm(rule_rows=9))  # more than there are rules
    rules = RuleSet.from_spans([(1, 2), (3, 4, 5)])
    model = start_model(rowed, backbone, Matcher(rules))
    assert model.require_module().rows.spans.tolist() == [[1, 2, -1, -1], [3, 4, 5, -1]]
    with torch.no_grad():
        model.require_module().rows.table.normal_(generator=torch_rng)
    Checkpoint.of(model).save(tmp_path / "start")
    task = Matcher(RuleSet.from_spans([(3, 4, 5), (8, 9)]))
    start = replace(rowed, start=str(tmp_path / "start"))
    module = start_model(start, backbone, task).require_module()
    assert module.rows.spans.tolist() == [[3, 4, 5, -1]]
    assert torch.equal(module.rows.table, model.require_module().rows.table[1:])
    assert module.rows.table.requires_grad
    longer = Matcher(RuleSet.from_spans([(3, 4, 5, 6, 7)]))
    with pytest.raises(ConfigError, match="must have the 4 tokens of its start; got 5"):
        start_model(start, backbone, longer)


def test_preferences_are_measured_with_the_positions_given(job: TrainJob, tmp_path: Path) -> None:
    backbone = load_backbone(job.backbone, dtype="float64")
    path, policies = tmp_path / "questions.jsonl", ("compact", "preserved")
    question = {"context": "w8 w1 w2 w3 w4 w5", "choices": ["w6 w9", "w7"], "gold": 0}
    path.write_text(json.dumps(question) + "\n", encoding="utf-8")
    job = replace(
        job,
        train=str(path),
        valid=str(path),
        config=PreferenceConfig(max_steps=1, beta=5.0),
        max_tokens=64,
        prompt="{context}?",
        delimiter=" = ",
    )
    matcher = Matcher(RuleSet.from_spans([(1, 2), (3, 4, 5)]))
    found, expected = [], []
    for policy in policies:
        model = placed(start_model(job, backbone, matcher), policy)
        objective = make_objective(job, model)
        objective.begin()
        questions = encode_questions(
            read_questions(path),
            backbone.encode,
            QuestionForm("{context}?", " = "),
            max_length=64,
        )
        with torch.no_grad():
            before = ending_scores(questions, model)
            model.require_module().norm_o.weight.mul_(-3.0)  # away from the reference
            after = ending_scores(questions, model)
            found.append(objective([0]).total.item())
        expected.append(preference_loss(after, before, [0], beta=5.0).item())
    assert found == pytest.approx(expected, abs=1e-6)
    assert abs(found[0] - found[1]) > 1e-5


def test_questions_need_the_prompt_of_their_task(job: TrainJob, tiny_llama: Backbone) -> None:
    job = replace(job, config=PreferenceConfig(max_steps=1))
    model = start_model(job, tiny_llama, Matcher(RuleSet.from_spans([(1, 2)])))
    with pytest.raises(ConfigError, match="the prompt must hold the field"):
        make_objective(job, model)
