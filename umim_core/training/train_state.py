"""Resume state of a training run: per rank, in safetensors and JSON, no pickle.

    state/step-00000050/rank-0.safetensors   module, optimiser, best weights, start, torch RNG
    state/step-00000050/rank-0.json          step, curve, selection
    state/step-00000050/manifest.json        written last, by rank 0

The newest directory with a valid manifest and the files of all ranks counts; older ones are kept to
two.
"""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from umim_core.checkpoint.module_weights import save_tensors
from umim_core.errors import ArtifactError, require
from umim_core.store.artifacts import (
    payload_files,
    read_manifest,
    write_json,
    write_manifest,
)
from umim_core.store.disk import flush_tree
from umim_core.store.publication import step_of
from umim_core.training.train_ranks import rank_and_world, ranks_where, sum_over_ranks

if TYPE_CHECKING:
    from umim_core.training.objectives import Objective
    from umim_core.training.optimizer import Strategy

logger = logging.getLogger("umim.train")
STATE_SCHEMA: Final = 2
_KEEP: Final = 2
_ENDINGS: Final = ("json", "safetensors")


@dataclass
class Progress:
    """Progress of a run; everything but tensors.

    Attributes:
        best_score: Least validation score so far, None before the first validation.
        stale: Validations since then.
        skipped: Steps skipped because the loss was not finite.
        finished: Whether training has ended (steps used up, or patience lost).
        curve: One row per step or validation, in order.
    """

    step: int = 0
    best_score: float | None = None
    best_step: int = 0
    stale: int = 0
    skipped: int = 0
    finished: bool = False
    curve: list[dict[str, float]] = field(default_factory=list)


def parameters_of(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's weights by name, tied ones once."""
    return {name: value.detach() for name, value in module.named_parameters()}


def load_parameters(module: nn.Module, tensors: dict[str, Tensor]) -> None:
    weights = parameters_of(module)
    known, found = ({k: v.shape for k, v in part.items()} for part in (weights, tensors))
    rule, remedy = "a resume state must fit its module", "Remove the partial directory."
    require(known == found, ArtifactError, rule, sorted(tensors), remedy)
    for name, value in weights.items():
        value.copy_(tensors[name])


def drop_states(directory: Path) -> None:
    """Remove every state: the run starts afresh; rank 0 only."""
    for state in directory.glob("step-*"):
        shutil.rmtree(state)


def save(
    objective: Objective,
    strategy: Strategy,
    directory: Path,
    progress: Progress,
    best: dict[str, Tensor],
) -> None:
    """Write the state of all ranks; it counts once every rank has written."""
    rank, world = rank_and_world()
    tensors = {
        **{f"module.{name}": value for name, value in parameters_of(objective.module).items()},
        **{f"best.{name}": value for name, value in best.items()},
        **{f"start.{name}": value for name, value in objective.start.items()},
        **strategy.tensors(),
    }
    packed = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    packed["rng.torch"] = torch.get_rng_state()
    state = directory / f"step-{progress.step:08d}"
    if rank == 0:
        shutil.rmtree(state, ignore_errors=True)
        state.mkdir(parents=True)
    sum_over_ranks([0.0])  # barrier: the directory exists
    save_tensors(packed, state / f"rank-{rank}.safetensors")
    write_json(state / f"rank-{rank}.json", asdict(progress))
    sum_over_ranks([0.0])  # barrier: every rank has written
    if rank == 0:
        commit(state, world)


def commit(state: Path, world: int) -> None:
    """Make a state valid that every rank has written, and drop old ones; rank 0 only."""
    flush_tree(state)
    # The listing from which the manifest is made: files that it lacks would not be sealed.
    _require_ranks(state, world)
    write_manifest(state, kind="train-state", schema=STATE_SCHEMA, body={"world": world})
    older = sorted(old for old in state.parent.glob("step-*") if old.name < state.name)
    newer = [old for old in state.parent.glob("step-*") if old.name > state.name]  # torn, or alien
    for old in older[: 1 - _KEEP] + newer:
        shutil.rmtree(old)


def _require_ranks(state: Path, world: int) -> None:
    expected = {f"rank-{rank}.{ending}" for rank in range(world) for ending in _ENDINGS}
    missing = ", ".join(sorted(expected.difference(payload_files(state))))
    rule = f"{state} must hold the files of all {world} ranks"
    remedy = "Workers must share the artifact root; run the same command again."
    require(not missing, ArtifactError, rule, f"none of the name {missing}", remedy)


def _check(state: Path, world: int) -> None:
    ranks = read_manifest(state, kind="train-state", schema=STATE_SCHEMA).get("world")
    rule = f"{state} must be the state of {world} ranks"
    remedy = "Train with as many workers as before, or go on from the start."
    require(ranks == world, ArtifactError, rule, ranks, remedy)
    _require_ranks(state, world)


def newest_state(directory: Path, world: int) -> Path | None:
    for state in sorted(directory.glob("step-*"), reverse=True):
        try:
            _check(state, world)
        except ArtifactError as error:
            logger.warning(
                "state %s is torn or of another run, the one before is used: %s", state.name, error
            )
            continue
        return state
    return None


def resume(
    objective: Objective, strategy: Strategy, directory: Path
) -> tuple[Progress, dict[str, Tensor]]:
    """Restore the newest whole state that rank 0 sees, on every rank.

    Returns:
        Where the run stands and the best weights so far; a start and none without a state.
    """
    rank, world = rank_and_world()
    newest = newest_state(directory, world) if rank == 0 else None
    # One more than the step, so that 0, the others' share of the sum, says that there is none.
    (seen,) = sum_over_ranks([0.0 if newest is None else 1.0 + step_of(newest)])
    if not seen:
        return Progress(), {}
    tensors, progress = _read(directory / f"step-{int(seen) - 1:08d}", rank, world)
    logger.info("resuming at step %d", progress.step)
    device = next(objective.module.parameters()).device

    def part(prefix: str) -> dict[str, Tensor]:
        return {
            name.removeprefix(prefix): value.to(device)
            for name, value in tensors.items()
            if name.startswith(prefix)
        }

    load_parameters(objective.module, part("module."))
    objective.start = part("start.")
    strategy.load({name: v for name, v in tensors.items() if name.startswith("optimizer.")})
    torch.set_rng_state(tensors["rng.torch"])
    return progress, part("best.")


def _read(state: Path, rank: int, world: int) -> tuple[dict[str, Tensor], Progress]:
    """Read what a rank wrote; where any of them cannot, all of them end."""
    refusal = None
    try:
        _check(state, world)
        tensors = load_file(state / f"rank-{rank}.safetensors")
        record = (state / f"rank-{rank}.json").read_text(encoding="utf-8")
        progress = Progress(**json.loads(record))
    except (ArtifactError, OSError, SafetensorError) as error:
        refusal = error
    # A rank that went on alone would wait for the others for good.
    lacking = ranks_where(refusal is not None)
    if lacking:
        raise ArtifactError(
            f"every rank must be able to read the resume state {state.name}",
            f"ranks {lacking} that cannot" + (f" ({refusal})" if refusal else ""),
            "Look at the file systems of their nodes, then run the same command again.",
        ) from refusal
    return tensors, progress
