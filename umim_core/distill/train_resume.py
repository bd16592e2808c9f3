"""Saving and resuming of the training loop, by all ranks together.

Rank 0 alone decides which state is resumed: two ranks that look by themselves may see directories
of different age, and would then train from different steps.
"""

from __future__ import annotations

import logging
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from umim_core.distill.objectives import Objective
from umim_core.distill.optimizer import Strategy
from umim_core.distill.train_ranks import (
    from_first_rank,
    rank_and_world,
    ranks_where,
    require_shared,
    sum_over_ranks,
)
from umim_core.distill.train_state import (
    Progress,
    begin_state,
    check_state,
    commit_state,
    load_parameters,
    newest_state,
    parameters_of,
    read_rank,
    state_path,
    step_of,
    write_rank,
)
from umim_core.errors import ArtifactError

logger = logging.getLogger("umim.train")
_NO_STATE = -1


def save(
    objective: Objective,
    strategy: Strategy,
    state_dir: Path,
    progress: Progress,
    best: dict[str, Tensor],
) -> None:
    """Write the state of all ranks; it counts once every rank has written."""
    rank, world = rank_and_world()
    tensors = {f"module.{k}": v for k, v in parameters_of(objective.module).items()}
    tensors |= {f"best.{k}": v for k, v in best.items()}
    tensors |= strategy.tensors()
    target = state_path(state_dir, progress.step)
    if rank == 0:
        begin_state(target)
    sum_over_ranks([0.0])  # barrier: the directory exists
    write_rank(target, rank, tensors, progress)
    sum_over_ranks([0.0])  # barrier: every rank has written
    if rank == 0:
        commit_state(state_dir, target, world)


def resume(
    objective: Objective, strategy: Strategy, state_dir: Path
) -> tuple[Progress, dict[str, Tensor]]:
    """Restore the newest whole state that rank 0 sees, on every rank.

    Returns:
        Where the run stands and the best weights so far; a start and none without a state.

    Raises:
        ClusterError: If the ranks do not share the directory.
        ArtifactError: If some rank cannot read that state, or it belongs to another module.
    """
    rank, world = rank_and_world()
    require_shared(state_dir)
    step = _NO_STATE
    if rank == 0 and (newest := newest_state(state_dir, world)) is not None:
        step = step_of(newest)
    step = from_first_rank(step)
    if step == _NO_STATE:
        return Progress(), {}
    tensors, progress = _read(state_path(state_dir, step), rank, world)
    logger.info("resuming at step %d", progress.step)
    device = next(objective.module.parameters()).device

    def part(prefix: str) -> dict[str, Tensor]:
        return {
            name.removeprefix(prefix): value.to(device)
            for name, value in tensors.items()
            if name.startswith(prefix)
        }

    load_parameters(objective.module, part("module."))
    strategy.load({name: v for name, v in tensors.items() if name.startswith("optimizer.")})
    return progress, part("best.")


def _read(target: Path, rank: int, world: int) -> tuple[dict[str, Tensor], Progress]:
    state, refusal = None, None
    try:
        check_state(target, world)
        state = read_rank(target, rank)
    except (ArtifactError, OSError, SafetensorError) as error:
        refusal = error
    # A rank that went on alone would wait for the others for good.
    lacking = ranks_where(state is None)
    if state is None or lacking:
        raise ArtifactError(
            f"every rank must be able to read the resume state {target.name}",
            f"ranks {lacking} that cannot" + (f" ({refusal})" if refusal else ""),
            "Look at the file systems of their nodes, then run the same command again.",
        ) from refusal
    return state
