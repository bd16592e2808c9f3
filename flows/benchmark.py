"""Flow ``umim-benchmark``: prefill and decode throughput, base against UMIM."""

from __future__ import annotations

from prefect import flow

from flows import parts
from tasks.run.pipeline import open_pipeline


@flow(name="umim-benchmark", flow_run_name="{recipe}")
def benchmark(recipe: str = "embedded") -> list[dict[str, float]]:
    """Train what is missing and time it; return the metrics of every cell."""
    with open_pipeline(recipe, "umim-benchmark") as run:
        results = parts.mine(run, parts.prepare(run))
        parts.distill(run, results)
        parts.benchmark(run, results)
        return [result.benchmark.metrics for result in results if result.benchmark is not None]
