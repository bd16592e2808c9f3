"""One Ray cluster per pipeline run, started when the first stage needs it and not before."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Self

from tasks.cluster import Cluster, ray_cluster
from umim_core.config import ClusterConfig


class ClusterLease:
    """Hold a cluster for the length of a ``with`` block; a run that only finds things starts none.

    Args:
        config: Address, cores, workers and strategy.
    """

    def __init__(self, config: ClusterConfig) -> None:
        self.config = config
        self._stack = ExitStack()
        self._cluster: Cluster | None = None

    def ensure(self) -> Cluster:
        """Return the running cluster, starting or joining it at the first call."""
        if self._cluster is None:
            self._cluster = self._stack.enter_context(
                ray_cluster(self.config.cpus, self.config.address)
            )
        return self._cluster

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()
        self._cluster = None
