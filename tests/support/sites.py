"""Sites of tests: stages are built below a root, in this process; artifacts that stand for some."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tasks.cluster.lease import ClusterLease
from tasks.run.stage import Artifact, Metrics, Site, StageSpec, run_stage
from umim_core.config.recipe import ClusterConfig


def here(root: Path) -> Site:
    """Return a site whose stages start no cluster."""
    return Site(root, ClusterLease(ClusterConfig(workers=0)))


def made(
    root: Path, stage: str, fill: Callable[[Path], object] = lambda _: None, **metrics: float
) -> Artifact:
    """Return an artifact of a stage of that name, whose folder is filled as is asked."""

    def build(out: Path) -> Metrics:
        fill(out)
        return metrics

    return run_stage(root, StageSpec(stage, 1, metrics, {}), build)
