"""Meeting of the workers of one machine for ``torch.distributed`` under Ray Train.

Ray's controller imports this module, so it imports nothing of ``umim_core`` that needs a model.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass

import ray
from ray.train._internal.base_worker_group import BaseWorkerGroup
from ray.train.torch import TorchConfig
from ray.train.torch.config import (
    _set_torch_distributed_env_vars,
    _setup_torch_process_group,
    _TorchBackend,
)

from tasks.cluster import guard


@dataclass
class MeetingConfig(TorchConfig):  # type: ignore[misc]  # Ray's types are not read
    """Set up ``torch.distributed`` for ``TorchTrainer(torch_config=MeetingConfig(...))``."""

    timeout_s: int = 300

    @property
    def backend_cls(self) -> type[_TorchBackend]:
        """Return the class that Ray Train calls at the start and the end of a worker group."""
        return _MeetingBackend


class _MeetingBackend(_TorchBackend):  # type: ignore[misc]  # Ray's types are not read
    def on_start(self, worker_group: BaseWorkerGroup, backend_config: MeetingConfig) -> None:
        """Join the workers of a fresh group, after every restart anew."""
        folder = os.environ.get(guard.VARIABLE)
        if folder is None:
            super().on_start(worker_group, backend_config)
            return
        backend = backend_config.backend
        if backend is None:
            gpus = worker_group.get_resources_per_worker().get("GPU", 0)
            backend = "nccl" if gpus > 0 else "gloo"
        # A TCP store's rank 0 listens on every interface, so workers of one machine meet in a file.
        # A new file per start: a store left by a killed group would be taken for this one.
        handle, path = tempfile.mkstemp(prefix="meet-", dir=folder)
        os.close(handle)
        worker_group.execute(_set_torch_distributed_env_vars)
        ray.get(
            [
                worker_group.execute_single_async(
                    rank,
                    _setup_torch_process_group,
                    backend=backend,
                    world_rank=rank,
                    world_size=len(worker_group),
                    init_method=f"file://{path}",
                    timeout_s=backend_config.timeout_s,
                )
                for rank in range(len(worker_group))
            ]
        )
