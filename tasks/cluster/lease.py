"""One Ray cluster per pipeline run, started when the first stage needs it and not before."""

from __future__ import annotations

import logging
import math
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Self

from tasks.cluster.nodes import check_nodes
from tasks.cluster.ray_cluster import Cluster, ray_cluster
from umim_core.config.recipe import ClusterConfig
from umim_core.errors import ClusterError, UmimError, require

logger = logging.getLogger("umim.cluster")


class ClusterLease:
    """Hold a cluster for the length of a ``with`` block; a run that only finds things starts none.

    ``ray-logs`` of the root, which every node sees, receives Ray's logs where a cluster's or an
    unforeseen error ends the block; the error names the place.
    """

    def __init__(self, config: ClusterConfig, root: Path | None = None) -> None:
        self.config = config
        self._logs = None if root is None else root / "ray-logs"
        self._stack = ExitStack()
        self._cluster: Cluster | None = None
        self._starting = threading.Lock()  # stages may ask side by side
        self._room = threading.Condition()
        self._taken = 0  # cores or GPUs that workers of stages have now

    def ensure(self) -> Cluster:
        """Return the running cluster, starting or joining it at the first call."""
        with self._starting:
            if self._cluster is None:
                config = self.config
                size = round(config.object_store_gib * (1 << 30))
                with ExitStack() as opened:
                    cluster = opened.enter_context(
                        ray_cluster(config.cpus, config.address, object_store_bytes=size)
                    )
                    if cluster.joined:
                        check_nodes(self._logs)
                    self._stack.push(opened.pop_all())
                self._cluster = cluster
            return self._cluster

    @contextmanager
    def room(self, needed: int) -> Iterator[Cluster]:
        """Have room for so many GPUs, or cores where none are used; stages wait for each other.

        Ray itself would let the second group of workers fail after waiting for a minute.
        """
        cluster, room = self.ensure(), math.inf  # one of others may still grow
        if cluster.is_here:
            kind, room = ("GPUs", cluster.gpus) if self.config.use_gpu else ("cores", cluster.cpus)
            rule = f"{needed} workers need as many {kind}"
            remedy = "Lower cluster.workers, or name a larger cluster with cluster.address."
            require(needed <= room, ClusterError, rule, room, remedy)
        with self._room:
            if self._taken + needed > room:
                logger.info("waiting until workers of other stages leave room for %d more", needed)
            self._room.wait_for(lambda: self._taken + needed <= room)
            self._taken += needed
        try:
            yield cluster
        finally:
            with self._room:
                self._taken -= needed
                self._room.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        foreseen = isinstance(error, UmimError) and not isinstance(error, ClusterError)
        logs = None if self._cluster is None else self._cluster.logs
        if isinstance(error, Exception) and not foreseen and logs and self._logs:
            moment = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
            kept = self._logs / f"{moment}-{os.getpid()}"
            with suppress(OSError):  # files that went meanwhile, a full disk: what can be copied
                shutil.copytree(logs, kept, ignore_dangling_symlinks=True, dirs_exist_ok=True)
            if kept.is_dir():
                error.add_note(f"Ray's logs are in {kept}.")
        self._stack.close()
        self._cluster = None
