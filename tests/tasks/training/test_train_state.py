"""Resume states: a run interrupted after any step, or with a torn state, ends the same bit for bit.

States are compared file by file, so weights, best weights, optimiser, random state and curve are
all in the comparison.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tasks.training.strategies import DdpStrategy
from umim_core.adaptation.choices import EncodedQuestion
from umim_core.backbone.backbone import Backbone
from umim_core.config.recipe import PreferenceConfig, TrainConfig
from umim_core.distill.objectives import DistillObjective, Objective, PreferenceObjective
from umim_core.distill.token_rows import TokenRows
from umim_core.distill.train_loop import TrainResult, train
from umim_core.distill.train_state import (
    Progress,
    begin_state,
    commit_state,
    newest_state,
    state_path,
    write_rank,
)
from umim_core.errors import ArtifactError
from umim_core.merging.compressed import Compressed
from umim_core.merging.module import MergeModule
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet

SEED, STEPS, WIDTH = 7, 6, 12
CONFIG = TrainConfig(
    max_steps=STEPS,
    batch_size=2,
    learning_rate=1e-2,
    validate_every=2,
    checkpoint_every=1,
    patience=100,
)
FILES = ("rank-0.safetensors", "rank-0.json", "manifest.json")


class Interrupted(Exception):
    """Stands for whatever ends a process."""


def rows(count: int, seed: int) -> TokenRows:
    """Random rows in which the rule (1, 2) matches once or twice."""
    ids = np.random.default_rng(seed).integers(3, 30, (count, WIDTH))
    ids[:, 2:4] = (1, 2)
    ids[::2, 8:10] = (1, 2)
    return TokenRows.of_rows(ids.tolist(), [WIDTH] * count)


def questions(count: int) -> list[EncodedQuestion]:
    rng = np.random.default_rng(1)
    found = []
    for index in range(count):
        context = np.concatenate([[1, 2], rng.integers(3, 30, 5), [1, 2]])
        endings = tuple(rng.integers(3, 30, 2 + choice) for choice in range(3))
        found.append(EncodedQuestion(context, endings, index % 3))
    return found


@dataclass
class Bench:
    """Starts runs over one backbone; every run gets fresh objects, as a new process would."""

    backbone: Backbone
    state: Path
    config: TrainConfig = CONFIG
    starts: int = 0
    steps: int = 0

    def objective(self) -> Objective:
        module = MergeModule(self.backbone.hidden_size)
        module.initialise(0.2, torch.Generator().manual_seed(SEED))
        matcher = Matcher(RuleSet.from_spans([(1, 2)]))
        if isinstance(self.config, PreferenceConfig):
            train_split, valid_split = questions(5), questions(3)
            return PreferenceObjective(
                module,
                Compressed(self.backbone, module, matcher, "compact"),
                train_split,
                valid_split,
                beta=0.1,
                batch_size=2,
                reference=self.state / "reference",
            )
        return DistillObjective(
            Compressed(self.backbone, module, matcher, "compact"),
            rows(5, 0),
            rows(3, 1),
            bf16=False,
            batch_size=2,
        )

    def run(self, stop_at: int | None = None) -> TrainResult:
        """Train, resuming; ``steps`` is then the number of steps this run took itself."""
        torch.manual_seed(SEED + self.starts)  # every process has another random state
        self.starts, self.steps = self.starts + 1, 0
        objective = self.objective()

        def on_step(progress: Progress, total: int) -> None:
            assert total == STEPS
            self.steps += 1
            if progress.step == stop_at:
                raise Interrupted

        strategy = DdpStrategy(objective, self.config)
        return train(
            objective, strategy, self.config, seed=SEED, state_dir=self.state, on_step=on_step
        )

    def interrupted(self, step: int) -> None:
        with pytest.raises(Interrupted):
            self.run(stop_at=step)

    def final(self) -> dict[str, bytes]:
        folder = self.state / f"step-{STEPS:08d}"
        return {name: (folder / name).read_bytes() for name in FILES}


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensors[name].detach().flatten() for name in sorted(tensors)])


@pytest.fixture
def bench(tiny_llama: Backbone, tmp_path: Path) -> Bench:
    return Bench(tiny_llama, tmp_path / "state")


PREFERENCE = PreferenceConfig(**CONFIG.model_dump(exclude={"weight_decay"}))
EVERY_TWO = CONFIG.model_copy(update={"checkpoint_every": 2})
EVERY_FOUR = CONFIG.model_copy(update={"checkpoint_every": 4})


@pytest.mark.parametrize(
    "config",
    [CONFIG, EVERY_TWO, EVERY_FOUR, PREFERENCE],
    ids=["every-step", "every-two", "every-four", "preference"],
)
def test_a_run_interrupted_after_any_step_ends_bit_for_bit_the_same(
    bench: Bench, tmp_path: Path, config: TrainConfig
) -> None:
    bench.config = config
    undisturbed = bench.run()
    expected = bench.final()
    for step in range(1, STEPS):
        again = Bench(bench.backbone, tmp_path / f"stopped-at-{step}", config)
        again.interrupted(step)
        if step < config.checkpoint_every:
            again.starts = 0  # no state yet: the run starts afresh, random state included
        result = again.run()
        assert again.final() == expected
        assert result.progress == undisturbed.progress
        assert torch.equal(flat(result.weights), flat(undisturbed.weights))
        # Only the steps after the last state are taken again.
        assert again.steps == STEPS - step + step % config.checkpoint_every


def test_a_finished_run_trains_no_further_step(bench: Bench) -> None:
    first = bench.run()
    second = bench.run()
    assert bench.steps == 0
    assert second.progress == first.progress
    assert torch.equal(flat(second.weights), flat(first.weights))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["cut", "gone", "flipped"])
def test_a_torn_state_falls_back_to_the_one_before(
    bench: Bench, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, damage: str
) -> None:
    bench.run()
    again = Bench(bench.backbone, tmp_path / "torn")
    again.interrupted(4)
    file = again.state / "step-00000004" / name
    content = file.read_bytes()
    if damage == "gone":
        file.unlink()
    elif damage == "cut":
        file.write_bytes(content[:-2])
    else:
        middle = len(content) // 2
        file.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    again.run()
    assert "step-00000004 is torn" in caplog.text
    assert again.steps == STEPS - 3
    assert again.final() == bench.final()


def test_without_a_whole_state_training_starts_afresh(bench: Bench, tmp_path: Path) -> None:
    bench.run()
    again = Bench(bench.backbone, tmp_path / "torn")
    again.interrupted(4)
    for manifest in again.state.glob("*/manifest.json"):
        manifest.unlink()
    again.starts = 0
    again.run()
    assert again.steps == STEPS
    assert again.final() == bench.final()


def test_two_states_are_kept_and_none_from_a_later_step(bench: Bench) -> None:
    (bench.state / "step-00000005").mkdir(parents=True)  # torn, left by another run
    bench.interrupted(4)
    assert sorted(path.name for path in bench.state.iterdir()) == [
        "step-00000003",
        "step-00000004",
    ]


def written(directory: Path, step: int, ranks: tuple[int, ...]) -> Path:
    """A state that these ranks have written and nobody has committed."""
    target = state_path(directory, step)
    begin_state(target)
    for rank in ranks:
        write_rank(target, rank, {"module.a": torch.zeros(2)}, Progress(step=step))
    return target


@pytest.mark.parametrize("name", ["rank-1.json", "rank-1.safetensors"])
def test_a_state_without_the_files_of_every_rank_is_not_committed(
    tmp_path: Path, name: str
) -> None:
    target = written(tmp_path, 3, (0, 1))
    (target / name).unlink()
    with pytest.raises(ArtifactError, match=f"the files of all 2 ranks; got none .* {name}"):
        commit_state(tmp_path, target, 2)
    assert not (target / "manifest.json").exists()


def test_a_state_of_another_number_of_ranks_is_passed_over(tmp_path: Path) -> None:
    commit_state(tmp_path, written(tmp_path, 3, (0, 1)), 2)
    assert newest_state(tmp_path, 1) is None
