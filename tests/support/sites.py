"""Sites of tests: stages are built below a root, in this process."""

from __future__ import annotations

from pathlib import Path

from tasks.cluster.lease import ClusterLease
from tasks.run.site import Site
from umim_core.config.recipe import ClusterConfig


def here(root: Path) -> Site:
    """Return a site whose stages start no cluster."""
    return Site(root, ClusterLease(ClusterConfig(workers=0)))
