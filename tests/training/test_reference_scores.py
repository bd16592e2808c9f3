"""Reference scores: computed once, found again to the bit, never those of another start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from support.merged_models import fresh_model
from support.tiny_models import random_backbone
from support.training_processes import run_ranks
from umim_core.adaptation.choices import EncodedQuestion
from umim_core.adaptation.preference import ending_scores
from umim_core.config.recipe import PreferenceConfig
from umim_core.merging.merged_model import MergedModel
from umim_core.training import reference_scores as subject
from umim_core.training.objectives import PreferenceObjective, Split, spread_rows
from umim_core.training.reference_scores import reference_scores
from umim_core.training.train_loop import asked_items, batch_indices

COUNT, BATCH = 101, 4  # two of a hundred and one questions are scored again
POISON = 31


def questions(count: int = COUNT, seed: int = 0) -> list[EncodedQuestion]:
    rng = np.random.default_rng(seed)
    return [
        EncodedQuestion(
            np.concatenate([[1, 2], rng.integers(3, POISON, 5)]),
            tuple(rng.integers(3, POISON, 1 + choice) for choice in range(2 + index % 2)),
            index % 2,
        )
        for index in range(count)
    ]


def model(seed: int = 0, *, spans: Sequence[tuple[int, ...]] = ((1, 2),)) -> MergedModel:
    return fresh_model(random_backbone("llama", seed=3, eos_token_id=0), spans, 0.3, seed)


@dataclass
class Start:
    """Starts of one training; ``scored`` counts the questions that the model has scored."""

    folder: Path
    merged_model: MergedModel = field(default_factory=model)
    questions: list[EncodedQuestion] = field(default_factory=questions)
    batch_size: int = BATCH
    scored: int = 0

    def scores(self) -> list[Tensor]:
        return reference_scores(
            self.questions,
            self.merged_model,
            self.merged_model.require_module(),
            batch_size=self.batch_size,
            folder=self.folder,
        )


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    begun = Start(tmp_path / "reference")

    def counted(batch: Sequence[EncodedQuestion], merged_model: MergedModel) -> list[Tensor]:
        begun.scored += len(batch)
        return ending_scores(batch, merged_model)

    monkeypatch.setattr(subject, "ending_scores", counted)
    return begun


def flat(scores: list[Tensor]) -> Tensor:
    return torch.cat(scores)


def test_scores_are_those_of_the_model_and_found_again_to_the_bit(start: Start) -> None:
    found = start.scores()
    assert start.scored == COUNT
    again = start.scores()
    assert start.scored == COUNT + 2  # one in a hundred is scored again
    assert torch.equal(flat(again), flat(found))
    with torch.no_grad():
        alone = [ending_scores([question], start.merged_model)[0] for question in start.questions]
    assert [len(scores) for scores in found] == [len(q.endings) for q in start.questions]
    torch.testing.assert_close(flat(found), flat(alone), atol=1e-5, rtol=0.0)
    assert found[0].dtype == torch.float32
    assert not any(scores.requires_grad for scores in found)


def changed(merged_model: MergedModel, change: str) -> MergedModel:
    if change == "weights":
        return model(seed=1)
    if change == "rules":
        return model(spans=[(1, 2), (3, 4)])
    if change == "positions":
        return replace(merged_model, unit_positions="preserved")
    dtype, seed = (torch.float64, 3) if change == "dtype" else (torch.float32, 4)
    module = merged_model.require_module().to(dtype)
    backbone = random_backbone("llama", dtype, seed=seed, eos_token_id=0)
    return replace(merged_model, backbone=backbone, module=module)


MODELS = ["weights", "rules", "positions", "backbone", "dtype"]


@pytest.mark.parametrize("change", [*MODELS, "answer", "order", "batches"])
def test_scores_of_another_start_are_computed_anew(
    start: Start, change: str, tmp_path: Path
) -> None:
    start.questions = questions(6, seed=5)
    start.scores()
    if change in MODELS:
        start.merged_model = changed(start.merged_model, change)
    elif change == "answer":
        start.questions[-1].endings[-1][0] += 1
    elif change == "order":
        start.questions.reverse()
    else:
        start.batch_size = 3
    start.scored = 0
    found = start.scores()
    assert start.scored == 6
    afresh = Start(tmp_path / "afresh", start.merged_model, start.questions, start.batch_size)
    assert torch.equal(flat(found), flat(afresh.scores()))


@pytest.mark.parametrize("name", ["scores.npy", "manifest.json"])
@pytest.mark.parametrize("damage", ["cut", "gone", "flipped"])
def test_torn_scores_are_computed_anew(start: Start, name: str, damage: str) -> None:
    start.questions = questions(6)
    first, file = start.scores(), start.folder / name
    content = file.read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        cut = content[:-9]
        file.write_bytes(cut if damage == "cut" else cut + bytes([content[-9] ^ 1]) + content[-8:])
    start.scored = 0
    assert torch.equal(flat(start.scores()), flat(first))
    assert start.scored == 6
    start.scored = 0
    start.scores()
    assert start.scored == 1  # what was computed anew is kept


def score_on_rank(rank: int, folder: Path) -> None:
    """Start twice, so that the scores are computed and then found; keep both."""
    run = Start(folder / "reference")
    for time in ("computed", "found"):
        np.save(folder / f"{time}-{rank}.npy", flat(run.scores()).numpy())


@pytest.mark.full
def test_two_ranks_get_the_bits_of_one_process(start: Start, tmp_path: Path) -> None:
    run_ranks(tmp_path / "pair", 2, score_on_rank, tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks have
    try:
        alone = flat(Start(tmp_path / "alone").scores()).numpy()
    finally:
        torch.set_num_threads(threads)
    for name in ("computed-0", "computed-1", "found-0", "found-1"):
        assert np.array_equal(np.load(tmp_path / f"{name}.npy"), alone), name


def test_a_short_run_scores_the_questions_that_it_will_ask_and_no_others(start: Start) -> None:
    config = PreferenceConfig(max_steps=3, batch_size=BATCH, learning_rate=0.1)
    asked = asked_items(config, 7, COUNT)
    first = batch_indices(7, 0, BATCH, COUNT)
    assert len(asked) == 3 * BATCH and {*first} < {*asked} < {*range(COUNT)}

    def objective(folder: Path, of: dict[Split, list[int]] | None) -> PreferenceObjective:
        train, valid = start.questions, questions(5, seed=1)
        module = start.merged_model.require_module()
        return PreferenceObjective(
            module, start.merged_model, train, valid, beta=0.1, batch_size=BATCH,
            reference=folder, asked=of,
        )  # fmt: skip

    short = objective(start.folder, {"train": asked, "valid": spread_rows(5, 2)})
    assert start.scored == len(asked) + 2
    whole = objective(start.folder.with_name("all"), None)
    torch.testing.assert_close(short(first).total, whole(first).total, atol=1e-5, rtol=0.0)
    assert short.validation_sums(0, 1, 2) == pytest.approx(whole.validation_sums(0, 1, 2))
    with pytest.raises(KeyError):
        short([index for index in range(COUNT) if index not in asked][:1])
