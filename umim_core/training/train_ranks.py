"""Communication between the ranks of a training run: sums and votes.

Only tensors travel. Every function that names ranks must be called by all of them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


def rank_and_world() -> tuple[int, int]:
    """Return this process's rank and the number of ranks; (0, 1) outside a group."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def sum_over_ranks(values: list[float]) -> list[float]:
    """Return the sums over all ranks; it is a barrier too."""
    if rank_and_world()[1] == 1:
        return values
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor)
    return [float(value) for value in tensor]


def ranks_where(condition: bool) -> list[int]:
    """Return the ranks on which the condition holds, the same list on all of them."""
    rank, world = rank_and_world()
    sums = sum_over_ranks([float(condition and other == rank) for other in range(world)])
    return [other for other, votes in enumerate(sums) if votes]
