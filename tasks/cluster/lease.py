"""One Ray cluster per pipeline run, started when the first stage needs it and not before."""

from __future__ import annotations

import logging
import math
import os
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from tasks.cluster.node_checks import check_nodes
from tasks.cluster.ray_cluster import Cluster, abandon, is_alive, ray_cluster
from tasks.cluster.stopping import park_if_stopping
from umim_core.config.recipe import ClusterConfig
from umim_core.errors import ClusterError, UmimError

logger = logging.getLogger("umim.cluster")


class ClusterLease:
    """Hold a cluster for the length of a ``with`` block; a run that only finds things starts none.

    Args:
        config: Address, cores, workers, strategy and what Ray gets.
        root: Artifact root, which every node of a cluster sees or has in storage. Its ``ray-logs``
            receives the logs of a cluster that died, or in whose block a cluster's or an unforeseen
            error was raised; the error names the place. None keeps none.
    """

    def __init__(self, config: ClusterConfig, root: Path | None = None) -> None:
        self.config = config
        self._logs = None if root is None else root / "ray-logs"
        self._stack = ExitStack()
        self._cluster: Cluster | None = None
        self._busy = threading.Lock()  # stages may ask side by side
        self._starter = ThreadPoolExecutor(1, "lease")
        self._room = threading.Condition()
        self._held = 0  # cores or GPUs that workers of stages have now

    def ensure(self) -> Cluster:
        """Return the running cluster, starting or joining it at the first call.

        A cluster that has died is replaced by another one, so a stage that is tried again can work.
        """
        with self._busy:
            if threading.current_thread() is threading.main_thread():
                return self._ensure()
            # The kernel ends Ray's processes with the thread that started them, and a part of a
            # flow has one that ends with it.
            return self._starter.submit(self._ensure).result()

    @contextmanager
    def room(self, needed: int) -> Iterator[Cluster]:
        """Have room for so many workers, or cores of one; stages side by side wait for each other.

        Ray itself would let the second group of workers fail after waiting for a minute.

        Args:
            needed: GPUs where the configuration has them, else cores.
        """
        cluster = self.ensure()
        room = self._room_of(cluster, needed)
        with self._room:
            if self._held + needed > room:
                logger.info("waiting until workers of other stages leave room for %d more", needed)
            self._room.wait_for(lambda: self._held + needed <= room)
            self._held += needed
        park_if_stopping()  # a stop may have ended the others
        try:
            yield self.ensure()  # it may have died while this stage waited
        finally:
            with self._room:
                self._held -= needed
                self._room.notify_all()

    def _room_of(self, cluster: Cluster, needed: int) -> float:
        """Return how many workers a cluster can hold: without limit if it may still grow."""
        if not cluster.address.startswith("127.0.0.1:"):
            return math.inf
        kind, room = ("GPUs", cluster.gpus) if self.config.use_gpu else ("cores", cluster.cpus)
        if needed > room:
            raise ClusterError(
                f"{needed} workers need as many {kind}",
                room,
                "Lower cluster.workers, or name a larger cluster with cluster.address.",
            )
        return room

    def _ensure(self) -> Cluster:
        if self._cluster is not None and not is_alive(self._cluster):
            log_folder = self._keep_logs()
            where = f"; its logs are in {log_folder}" if log_folder else ""
            logger.warning("the Ray cluster is lost, another one is started%s", where)
            if self._cluster.started:
                abandon()
            self._close()
        park_if_stopping()  # the stop itself may have killed it
        if self._cluster is None:
            cluster = self._stack.enter_context(
                ray_cluster(
                    self.config.cpus,
                    self.config.address,
                    object_store_bytes=round(self.config.object_store_gib * (1 << 30)),
                )
            )
            try:
                if cluster.joined:
                    cluster = replace(cluster, shared=check_nodes(self._logs))
            except ClusterError:
                self._close()
                raise
            self._cluster = cluster
        return self._cluster

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, ClusterError) or (
            isinstance(error, Exception) and not isinstance(error, UmimError)
        ):
            log_folder = self._keep_logs()
            if log_folder is not None:
                error.add_note(f"Ray's logs are in {log_folder}.")
        self._close()
        self._starter.shutdown()

    def _close(self) -> None:
        self._stack.close()
        self._cluster = None

    def _keep_logs(self) -> Path | None:
        if self._cluster is None or self._cluster.logs is None or self._logs is None:
            return None
        return keep_logs(self._cluster.logs, self._logs)


def keep_logs(logs: Path, place: Path) -> Path | None:
    """Copy Ray's logs, which go with their folder, to a place that stays.

    Returns:
        That folder, or None if nothing could be copied.
    """
    folder = place / f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{os.getpid()}"
    with suppress(OSError):  # files that went meanwhile, a full disk: what can be copied
        shutil.copytree(logs, folder, ignore_dangling_symlinks=True, dirs_exist_ok=True)
    return folder if folder.is_dir() else None
