"""Training jobs of controls: from a question file to a directory, and the same after a kill."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from support.tiny_jobs import tiny_job, train_jobs
from support.tiny_models import save_with_tokenizer
from support.trained_controls import KINDS, scores
from support.training_processes import run_ranks
from tasks.training.strategies import make_strategy
from tasks.training.train_worker import run_worker
from umim_core.adaptation.control import load_control, read_record
from umim_core.backbone.backbone import Backbone, load_backbone
from umim_core.config.recipe import PreferenceConfig
from umim_core.errors import ConfigError
from umim_core.merging.merged_model import MergedModel
from umim_core.training import train_job
from umim_core.training.train_job import TrainJob, read_curve, run_job, start_of
from umim_core.training.train_state import Progress

STEPS = 6
FILES = ("config.json", "manifest.json", "model.safetensors")


@pytest.fixture(scope="module")
def job(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_llama: Backbone,
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> TrainJob:
    folder = tmp_path_factory.mktemp("job")
    save_with_tokenizer(folder, tiny_llama, tiny_tokenizer)
    questions = [
        {"context": f"w{n} w{n + 1} w{n + 2}", "choices": [f"w{n + 3}", f"w{n} w{n}"], "gold": 0}
        for n in range(1, 9)
    ]
    lines = "".join(json.dumps(question) + "\n" for question in questions)
    (folder / "questions.jsonl").write_text(lines, encoding="utf-8")
    config = PreferenceConfig(
        max_steps=STEPS,
        batch_size=4,
        learning_rate=1e-2,
        validate_every=2,
        checkpoint_every=1,
        patience=100,
        beta=1.0,
    )
    return tiny_job(
        folder,
        32,
        config,
        rules=None,
        train=str(folder / "questions.jsonl"),
        valid=str(folder / "questions.jsonl"),
        seed=3,
        prompt="{context}",
    )


def files(out: Path) -> dict[str, bytes]:
    return {name: (out / "control" / name).read_bytes() for name in FILES}


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_trains_a_control_and_writes_it(job: TrainJob, kind: str, tmp_path: Path) -> None:
    run_worker(replace(job, control=kind, out=str(tmp_path)))
    backbone = load_backbone(job.backbone)
    trained = load_control(tmp_path / "control", backbone)
    base = MergedModel.without_merging(backbone)
    assert not torch.allclose(scores(trained), scores(base), atol=1e-3)
    losses = [row["valid_loss"] for row in read_curve(tmp_path) if "valid_loss" in row]
    assert losses[0] == pytest.approx(0.6931, abs=1e-3)
    assert losses[-1] < losses[0] - 0.02
    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    assert summary["steps"] == STEPS
    assert summary.pop("backbone_fingerprint") == backbone.fingerprint
    assert read_record(tmp_path / "control").training == {**summary, "seed": job.seed}
    assert not (tmp_path / "checkpoint").exists()


def test_a_killed_job_ends_with_the_same_bytes(
    job: TrainJob,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    step = 4
    run_whole, run_killed = (
        partial(run_job, replace(job, control="lora", out=str(tmp_path / name)))
        for name in ("whole", "killed")
    )
    strategy = partial(make_strategy, "ddp")
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    run_whole(strategy)

    def kill_at(progress: Progress, total: int) -> None:
        if progress.step == step:
            raise InterruptedError

    with monkeypatch.context() as patch:
        patch.setattr(train_job, "step_reporter", lambda state: kill_at)
        with pytest.raises(InterruptedError):
            run_killed(strategy)
    assert not (tmp_path / "killed" / "control").exists()
    torch.manual_seed(step)  # a new process has another random state
    with caplog.at_level("INFO", "umim.train"):
        run_killed(strategy)
    assert f"resuming at step {step}" in caplog.messages
    assert files(tmp_path / "killed") == files(tmp_path / "whole")
    assert read_curve(tmp_path / "killed") == read_curve(tmp_path / "whole")


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_train_the_control_of_one(job: TrainJob, kind: str, tmp_path: Path) -> None:
    backbone = load_backbone(job.backbone)
    alone = replace(job, control=kind, out=str(tmp_path / "alone"))
    ddp = replace(alone, out=str(tmp_path / "ddp"))
    pairs = (ddp, replace(alone, strategy="deepspeed", out=str(tmp_path / "zero")))
    for made in (alone, *pairs):
        Path(made.out).mkdir()
    run_worker(alone)
    run_ranks(tmp_path / "ranks", 2, train_jobs, *pairs)
    expected = scores(load_control(Path(alone.out) / "control", backbone))
    for pair in pairs:
        found = scores(load_control(Path(pair.out) / "control", backbone))
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


def test_what_is_no_start_is_refused(job: TrainJob, tiny_llama: Backbone) -> None:
    with pytest.raises(ConfigError, match="a merge module must have rules"):
        start_of(job, tiny_llama)
    with pytest.raises(ConfigError, match="Did you mean 'input-adapter'"):
        start_of(replace(job, control="inputadapter"), tiny_llama)
