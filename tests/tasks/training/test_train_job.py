"""Training jobs from files to files: how they start, what a control is, a backbone that changes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from support.merged_models import fresh_model, placed
from support.tiny_training import scores
from support.training_processes import run_ranks
from tasks.training.strategies import DdpStrategy, make_strategy
from tasks.training.train_worker import run_worker
from umim_core.adaptation.choices import encode_questions
from umim_core.adaptation.control import CONTROLS, load_control, read_record
from umim_core.backbone.backbone import Backbone, load_backbone
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.config.form import ModuleForm, UnitPositions
from umim_core.config.recipe import DistillConfig, PreferenceConfig, TrainConfig
from umim_core.errors import BackboneError, ConfigError
from umim_core.merging.merged_model import MergedModel
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet
from umim_core.task_sets.spec import QuestionForm, read_questions
from umim_core.training import train_job
from umim_core.training.objectives import ending_scores, preference_loss
from umim_core.training.token_rows import TokenRows
from umim_core.training.train_job import TrainJob, make_objective, read_curve, run_job, start_model

STEPS = 6
SPANS = [(1, 2), (3, 4, 5)]
MATCHER = Matcher(RuleSet.from_spans(SPANS))
ROWS = [[8, 1, 2, 9, 10, 3, 4, 5, 11, 12], [1, 2, 9, 8, 7, 3, 4, 5, 1, 2]]


@pytest.fixture(scope="module")
def job(
    tmp_path_factory: pytest.TempPathFactory, tiny_llama: Backbone, tiny_checkpoint: Path
) -> TrainJob:
    """A distillation over two rows; questions lie beside them."""
    folder = tmp_path_factory.mktemp("job")
    RuleSet.from_spans(SPANS, tiny_llama.tokenizer_fingerprint).save(folder / "rules")
    TokenRows.of_rows(ROWS, [10, 10]).save(folder / "rows")
    questions = [
        {"context": f"w8 w1 w2 w{n} w3 w4 w5", "choices": [f"w{n + 3}", f"w{n} w{n}"], "gold": 0}
        for n in range(1, 9)
    ]
    lines = "".join(json.dumps(question) + "\n" for question in questions)
    (folder / "questions.jsonl").write_text(lines, encoding="utf-8")
    return TrainJob(
        backbone=str(tiny_checkpoint.parent / "backbone"),
        rules=str(folder / "rules"),
        config=DistillConfig(max_steps=1, bf16=False),
        max_tokens=10,
        train=str(folder / "rows"),
        valid=str(folder / "rows"),
    )


@pytest.fixture(scope="module")
def dpo(job: TrainJob) -> TrainJob:
    """Preferences between the answers, from fresh weights."""
    questions = str(Path(job.train).with_name("questions.jsonl"))
    config = PreferenceConfig(
        max_steps=STEPS,
        batch_size=4,
        learning_rate=1e-2,
        validate_every=2,
        checkpoint_every=1,
        patience=100,
        beta=1.0,
    )
    settings = {"config": config, "max_tokens": 32, "seed": 3, "prompt": "{context}"}
    return replace(job, train=questions, valid=questions, **settings)


def run_in(out: Path, job: TrainJob, strategy: object = partial(make_strategy, "ddp")) -> None:
    out.mkdir(exist_ok=True)
    run_job(replace(job, out=str(out)), strategy)


def content(out: Path) -> dict[str, bytes]:
    """The files of a result, without its state."""
    return {
        path.relative_to(out).as_posix(): path.read_bytes()
        for path in out.rglob("*")
        if path.is_file() and "state" not in path.parts
    }


@pytest.mark.parametrize("start", [False, True])
def test_a_module_is_trained_with_the_positions_of_its_cell_or_of_its_start(
    job: TrainJob, tmp_path: Path, start: bool
) -> None:
    backbone = load_backbone(job.backbone)
    begun = replace(job, form=ModuleForm(unit_positions="preserved"))
    if start:
        model = fresh_model(backbone, SPANS, 0.5, 1, "preserved")
        Checkpoint.of(model).save(tmp_path / "start")
        begun = replace(job, start=str(tmp_path / "start"))
    model = start_model(begun, backbone, MATCHER)
    policies: tuple[UnitPositions, ...] = (model.unit_positions, "compact", "preserved")
    found, compact, preserved = (
        make_objective(begun, placed(model, policy))([0, 1]).total.item() for policy in policies
    )
    assert found == preserved
    assert abs(preserved - compact) > 1e-6
    assert start_model(job, backbone, MATCHER).unit_positions == "compact"


def test_adaptation_keeps_the_rows_of_the_rules_that_stay(
    job: TrainJob, tiny_llama: Backbone, tmp_path: Path, torch_rng: torch.Generator
) -> None:
    rowed = replace(job, form=ModuleForm(rule_rows=9))  # more than there are rules
    model = start_model(rowed, tiny_llama, MATCHER)
    assert model.require_module().rows.spans.tolist() == [[1, 2, -1, -1], [3, 4, 5, -1]]
    with torch.no_grad():
        model.require_module().rows.table.normal_(generator=torch_rng)
    Checkpoint.of(model).save(tmp_path / "start")
    task = Matcher(RuleSet.from_spans([(3, 4, 5), (8, 9)]))
    start = replace(rowed, start=str(tmp_path / "start"))
    module = start_model(start, tiny_llama, task).require_module()
    assert module.rows.spans.tolist() == [[3, 4, 5, -1]]
    assert torch.equal(module.rows.table, model.require_module().rows.table[1:])
    assert module.rows.table.requires_grad
    longer = Matcher(RuleSet.from_spans([(3, 4, 5, 6, 7)]))
    with pytest.raises(ConfigError, match="must have the 4 tokens of its start; got 5"):
        start_model(start, tiny_llama, longer)


def test_preferences_are_measured_with_the_positions_given(dpo: TrainJob) -> None:
    backbone = load_backbone(dpo.backbone, dtype="float64")
    asked = replace(dpo, config=PreferenceConfig(max_steps=1, beta=5.0), delimiter=" = ")
    form = QuestionForm("{context}", " = ")
    questions = encode_questions(read_questions(dpo.train), backbone.encode, form, 32)[:1]
    found, expected = [], []
    for policy in ("compact", "preserved"):
        model = placed(start_model(asked, backbone, MATCHER), policy)
        objective = make_objective(asked, model)
        objective.begin()
        with torch.no_grad():
            before = ending_scores(questions, model)
            model.require_module().norm_o.weight.mul_(-3.0)  # away from the reference
            after = ending_scores(questions, model)
            found.append(objective([0]).total.item())
        expected.append(preference_loss(after, before, [0], beta=5.0).item())
    assert found == pytest.approx(expected, abs=1e-6)
    assert abs(found[0] - found[1]) > 1e-5


def test_what_cannot_start_is_refused(dpo: TrainJob, tmp_path: Path) -> None:
    for changes, message in (
        ({"prompt": None}, "the prompt must hold the field"),
        ({"rules": None}, "a merge module must have rules"),
        ({"control": "inputadapter"}, "Did you mean 'input-adapter'"),
        ({"max_tokens": 65}, "at most 64 tokens, the positions of .*; got 65"),
    ):
        with pytest.raises(ConfigError, match=message):
            run_in(tmp_path, replace(dpo, **changes))


class Stopping(DdpStrategy):
    """A strategy that ends the run from outside at its fourth step."""

    steps = 0

    def update(self, loss: Tensor, learning_rate: float) -> float:
        self.steps += 1
        if self.steps == 4:
            raise KeyboardInterrupt
        return super().update(loss, learning_rate)


@pytest.mark.parametrize("kind", CONTROLS)
def test_a_job_trains_a_control_and_writes_it_stopped_and_resumed_or_not(
    dpo: TrainJob, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job, stopped = replace(dpo, control=kind, rules=None), tmp_path / "stopped"
    with pytest.raises(KeyboardInterrupt):
        run_in(stopped, job, Stopping)
    caplog.set_level("INFO", "umim.train")
    run_in(stopped, job)
    assert "resuming at step 3" in caplog.text
    run_in(tmp_path, job)
    assert content(tmp_path / "control") == content(stopped / "control")
    assert read_curve(tmp_path) == read_curve(stopped)
    backbone = load_backbone(dpo.backbone)
    trained = load_control(tmp_path / "control", backbone)
    base = MergedModel.without_merging(backbone)
    assert not torch.allclose(scores(trained), scores(base), atol=1e-3)
    losses = [row["valid_loss"] for row in read_curve(tmp_path) if "valid_loss" in row]
    assert losses[0] == pytest.approx(0.6931, abs=1e-3)
    assert losses[-1] < losses[0] - 0.02
    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    assert summary["steps"] == STEPS
    assert summary.pop("backbone_fingerprint") == backbone.fingerprint
    assert read_record(tmp_path / "control").training == {**summary, "seed": dpo.seed}
    assert not (tmp_path / "checkpoint").exists()


def train_each(_: int, *jobs: TrainJob) -> None:
    for job in jobs:
        run_worker(job)


@pytest.mark.full
@pytest.mark.parametrize("kind", CONTROLS)
def test_two_ranks_train_the_control_of_one(dpo: TrainJob, kind: str, tmp_path: Path) -> None:
    backbone = load_backbone(dpo.backbone)
    alone = replace(dpo, control=kind, out=str(tmp_path / "alone"))
    ddp = replace(alone, out=str(tmp_path / "ddp"))
    pairs = (ddp, replace(alone, strategy="deepspeed", out=str(tmp_path / "zero")))
    for made in (alone, *pairs):
        Path(made.out).mkdir()
    run_worker(alone)
    run_ranks(tmp_path / "ranks", 2, train_each, *pairs)
    expected = scores(load_control(Path(alone.out) / "control", backbone))
    for pair in pairs:
        found = scores(load_control(Path(pair.out) / "control", backbone))
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


class Touching(DdpStrategy):
    """A strategy that changes one frozen weight at its second step."""

    steps = 0

    def __init__(self, backbones: Sequence[Backbone], goal: nn.Module, config: TrainConfig) -> None:
        super().__init__(goal, config)
        self.backbones = backbones

    def update(self, loss: Tensor, learning_rate: float) -> float:
        self.steps += 1
        if self.steps == 2:
            with torch.no_grad():
                self.backbones[-1].embedding_weight[9, 0] *= 1.01
        return super().update(loss, learning_rate)


def test_a_changed_backbone_is_refused_and_nothing_of_its_training_is_kept(
    dpo: TrainJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[Backbone] = []

    def load(*arguments: object, **options: object) -> Backbone:
        loaded.append(load_backbone(*arguments, **options))
        return loaded[-1]

    monkeypatch.setattr(train_job, "load_backbone", load)
    touched = tmp_path / "touched"
    with pytest.raises(BackboneError, match=r"must be as they were loaded; got others on ranks"):
        run_in(touched, dpo, partial(Touching, loaded))
    assert not (touched / "checkpoint").exists()
    assert not list(touched.glob("state/step-*"))
    for out in (touched, tmp_path / "undisturbed"):
        run_in(out, dpo)
    assert content(touched) == content(tmp_path / "undisturbed")
