from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from support.tiny_language_models import CONFIG, LENGTH, SHAPES
from tasks.training.language_model import (
    LanguageModelObjective,
    fresh_model,
)
from tasks.training.strategies import DdpStrategy
from umim_core.distill.train_loop import TrainResult, train
from umim_core.distill.train_state import Progress
from umim_core.errors import CorpusError
from umim_core.text.shards import TokenShards

CHECKOUT = Path(__file__).resolve().parents[3]
VOCAB = 40


def stream(tokens: int, seed: int) -> np.ndarray:
    """Ids in which each one is likely followed by its successor: something to learn."""
    steps = np.random.default_rng(seed).choice([1, 1, 1, 5], tokens)
    return (np.cumsum(steps) % VOCAB).astype(np.int32)


def objective(shape: str = "llama", *, bf16: bool = False) -> LanguageModelObjective:
    return LanguageModelObjective(
        fresh_model(SHAPES[shape], VOCAB, 0, seed=0),
        TokenShards.of_array(stream(500, 1)),
        TokenShards.of_array(stream(200, 2)),
        length=LENGTH,
        bf16=bf16,
        batch_size=3,
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_the_loss_is_that_of_transformers(shape: str) -> None:
    ours = objective(shape)
    indices = [3, 0, 7]
    rows = np.stack([stream(500, 1)[i * LENGTH : (i + 1) * LENGTH + 1] for i in indices])
    ids = torch.from_numpy(rows.astype(np.int64))
    theirs = ours.module(input_ids=ids, labels=ids).loss
    loss = ours(indices)
    assert loss.weight == 3 * LENGTH
    torch.testing.assert_close(loss.total / loss.weight, theirs, rtol=1e-6, atol=1e-6)
    (gradient,) = torch.autograd.grad(
        loss.total / loss.weight, [ours.module.get_input_embeddings().weight]
    )
    (expected,) = torch.autograd.grad(theirs, [ours.module.get_input_embeddings().weight])
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)


def test_bfloat16_autocast_changes_the_arithmetic_but_hardly_the_loss() -> None:
    exact, rough = objective()([0, 1]).total, objective(bf16=True)([0, 1]).total
    assert not torch.equal(exact, rough)
    assert rough.item() == pytest.approx(exact.item(), rel=1e-2)


def test_validation_covers_whole_rows_and_ranks_share_them() -> None:
    ours = objective()
    everything = ours.validation_sums(0, 1, 100)
    assert everything[0] == (200 - 1) // LENGTH * LENGTH
    halves = [ours.validation_sums(rank, 2, 100) for rank in (0, 1)]
    assert np.sum(halves, axis=0) == pytest.approx(everything, rel=1e-6)
    assert ours.validation_sums(0, 1, 3)[0] == 3 * LENGTH


def test_validation_text_shorter_than_a_row_is_refused() -> None:
    with pytest.raises(CorpusError, match=f"at least one row of {LENGTH + 1} tokens; got {LENGTH}"):
        LanguageModelObjective(
            fresh_model(SHAPES["llama"], VOCAB, 0, seed=0),
            TokenShards.of_array(stream(500, 1)),
            TokenShards.of_array(stream(LENGTH, 2)),
            length=LENGTH,
            bf16=False,
            batch_size=3,
        )


def test_training_text_shorter_than_a_row_is_refused(tmp_path: Path) -> None:
    short = LanguageModelObjective(
        fresh_model(SHAPES["llama"], VOCAB, 0, seed=0),
        TokenShards.of_array(stream(LENGTH, 1)),
        TokenShards.of_array(stream(200, 2)),
        length=LENGTH,
        bf16=False,
        batch_size=3,
    )
    with pytest.raises(CorpusError, match="at least one row; got 0"):
        train(short, DdpStrategy(short, CONFIG), CONFIG, seed=0, state_dir=tmp_path)


def test_only_matrices_decay() -> None:
    ours = objective("gpt2")
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(1.0)
    before = {name: value.detach().clone() for name, value in ours.named_parameters()}
    nothing = sum(parameter.sum() for parameter in ours.parameters()) * 0.0
    DdpStrategy(ours, CONFIG).update(nothing, 0.5)
    shrunk = 1 - 0.5 * CONFIG.weight_decay
    for name, value in ours.named_parameters():
        expected = before[name] * shrunk if value.dim() > 1 else before[name]
        torch.testing.assert_close(value.detach(), expected, msg=name)


def run(state: Path, stop_at: int | None = None) -> TrainResult:
    ours = objective()

    def stop(progress: Progress, _: int) -> None:
        if progress.step == stop_at:
            raise InterruptedError

    return train(ours, DdpStrategy(ours, CONFIG), CONFIG, seed=3, state_dir=state, on_step=stop)


def test_training_lowers_the_loss(tmp_path: Path) -> None:
    scores = [row["valid_loss"] for row in run(tmp_path).progress.curve if "valid_loss" in row]
    assert scores[0] == pytest.approx(math.log(VOCAB), abs=0.1)  # knows nothing yet
    assert scores[-1] < scores[0] - 0.1


def test_a_stopped_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    undisturbed = run(tmp_path / "a")
    with pytest.raises(InterruptedError):
        run(tmp_path / "b", stop_at=3)
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["step-00000002"]
    resumed = run(tmp_path / "b")
    assert resumed.progress == undisturbed.progress
    assert list(resumed.weights) == list(undisturbed.weights)
    for name, value in undisturbed.weights.items():
        assert torch.equal(resumed.weights[name], value), name


def test_fresh_weights_follow_the_seed() -> None:
    def flat(seed: int) -> Tensor:
        model = fresh_model(SHAPES["llama"], VOCAB, 0, seed)
        return nn.utils.parameters_to_vector(model.parameters())

    assert torch.equal(flat(1), flat(1))
    assert not torch.equal(flat(1), flat(2))
