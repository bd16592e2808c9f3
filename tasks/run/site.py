"""Site of a run: the place where stages are built, and its facts that results may depend on."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

from tasks.cluster.lease import ClusterLease
from tasks.cluster.ray_cluster import LOCAL, cluster_address
from tasks.cluster.worker_tasks import calls_leave_this_process
from umim_core.config.recipe import BackboneDtype, Device


@dataclass(frozen=True)
class Site:
    """Artifact root, cluster, and the data type of backbones that are measured."""

    root: Path
    lease: ClusterLease
    dtype: BackboneDtype = "float32"

    @property
    def device(self) -> Device:
        return self.lease.config.device

    @property
    def workers(self) -> int:
        """Ranks of a training; this process is one."""
        return max(1, self.lease.config.workers)

    @property
    def strategy(self) -> str:
        return self.lease.config.strategy

    @property
    def machine(self) -> str:
        """Where a timing will run, as far as it is known without a cluster and without CUDA.

        On this machine these are its processor and the threads: torch's own in this process, all
        cores of the cluster on a worker. Of a cluster elsewhere it is the address.
        """
        config = self.lease.config
        if not calls_leave_this_process(config):
            import torch

            return machine_name(torch.get_num_threads())
        address = cluster_address(config.address)
        return address if address != LOCAL else machine_name(config.cpus or os.cpu_count() or 1)


def machine_name(threads: int) -> str:
    """Return the name of this machine's processor, and so many threads."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.is_file() else ""
    model = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    processor = model[1] if model else platform.processor() or platform.machine()
    return f"{processor}, {threads} threads"
