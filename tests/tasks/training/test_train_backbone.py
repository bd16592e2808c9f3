from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from support.tiny_jobs import tiny_job
from support.tiny_models import save_with_tokenizer
from tasks.training.strategies import DdpStrategy, make_strategy
from tasks.training.train_worker import run_worker
from umim_core.backbone.backbone import Backbone, load_backbone
from umim_core.config.recipe import DistillConfig, PreferenceConfig, TrainConfig
from umim_core.errors import BackboneError
from umim_core.rules.ruleset import RuleSet
from umim_core.training import train_job
from umim_core.training.token_rows import TokenRows
from umim_core.training.train_job import TrainJob, run_job

STEPS, WIDTH = 4, 12
SETTINGS = {"max_steps": STEPS, "batch_size": 4, "checkpoint_every": 2, "validate_every": 2}
QUESTION = {"context": "w8 w1 w2 w3 w4 w5", "choices": ["w6 w9", "w7", "w8 w8 w6"]}


@pytest.fixture(scope="module")
def dpo(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_llama: Backbone,
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> TrainJob:
    """DPO on what an SFT from fresh weights gives."""
    folder = tmp_path_factory.mktemp("jobs")
    save_with_tokenizer(folder, tiny_llama, tiny_tokenizer)
    fingerprint = load_backbone(str(folder / "backbone")).tokenizer_fingerprint
    rules = RuleSet.from_spans([(1, 2), (3, 4, 5)], tokenizer_fingerprint=fingerprint)
    rules.save(folder / "rules")
    rows = [[8, 1, 2, 9, 10, 3, 4, 5, 11, 12, 7, 6], [1, 2, 9, 8, 7, 3, 4, 5, 1, 2, 6, 6]] * 3
    TokenRows.of_rows(rows, [WIDTH] * len(rows)).save(folder / "rows")
    lines = [json.dumps(QUESTION | {"gold": gold % 3}) for gold in range(6)]
    (folder / "questions.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    sft = tiny_job(folder, WIDTH, DistillConfig(**SETTINGS, bf16=False), out=str(folder / "sft"))
    (folder / "sft").mkdir()
    run_worker(sft)
    return replace(
        sft,
        train=str(folder / "questions.jsonl"),
        valid=str(folder / "questions.jsonl"),
        start=str(folder / "sft" / "checkpoint"),
        config=PreferenceConfig(**SETTINGS),
        prompt="{context}?",
    )


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[Backbone]:
    """The backbones that jobs of this process have loaded."""
    found: list[Backbone] = []

    def load(*arguments: object, **options: object) -> Backbone:
        found.append(load_backbone(*arguments, **options))
        return found[-1]

    monkeypatch.setattr(train_job, "load_backbone", load)
    return found


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
    dpo: TrainJob, loaded: list[Backbone], tmp_path: Path
) -> None:
    job = replace(dpo, out=str(tmp_path / "touched"))
    with pytest.raises(BackboneError, match=r"must be as they were loaded; got others on ranks"):
        run_job(job, partial(Touching, loaded))
    out = Path(job.out)
    assert not (out / "checkpoint").exists()
    assert not list(out.glob("state/step-*"))
    undisturbed = replace(job, out=str(tmp_path / "undisturbed"))
    for again in (job, undisturbed):
        Path(again.out).mkdir(exist_ok=True)
        run_job(again, partial(make_strategy, "ddp"))
    assert content(job) == content(undisturbed)


def content(job: TrainJob) -> dict[str, bytes]:
    """Return the files of a job's result, without its state."""
    out = Path(job.out)
    return {
        path.relative_to(out).as_posix(): path.read_bytes()
        for path in out.rglob("*")
        if path.is_file() and "state" not in path.parts
    }
