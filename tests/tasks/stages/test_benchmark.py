"""Speed-ups in the comparison: the batch size and prompt that the documents name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from support.token_artifacts import tokenized
from tasks.cluster.lease import ClusterLease
from tasks.report.compare import CellResult, comparison_rows
from tasks.run.stage import Artifact, StageSpec, run_stage
from tasks.stages.benchmark import benchmark_stage, throughput_rows
from umim_core.config.evaluate import BenchmarkConfig
from umim_core.config.recipe import Cell, ClusterConfig

PROMPTS, BATCHES = (8, 24, 16), (2, 1)


def test_the_comparison_shows_the_longest_prompt_at_the_first_batch_size(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    tokens = tokenized(tmp_path, {"test": np.arange(400) % 9 + 1})
    config = BenchmarkConfig(
        prompt_lengths=PROMPTS, batch_sizes=BATCHES, new_tokens=2, warmup=0, pairs=1
    )
    lease = ClusterLease(ClusterConfig(workers=0))
    timed = benchmark_stage(tmp_path, lease, tokens, tiny_checkpoint, config)
    place = json.loads((timed.path / "machine.json").read_text("utf-8"))
    assert place == timed.manifest()["config"]["machine"]
    assert place.endswith(f", {torch.get_num_threads()} threads")
    (tmp_path / "trained").mkdir()
    (tmp_path / "trained" / "checkpoint").symlink_to(tiny_checkpoint)
    trained = Artifact("distill", "", tmp_path / "trained", "", executed=True)
    result = CellResult(
        Cell(backbone="tiny"),
        tokens,
        trained,
        settings={"WT": trained},
        evaluations={"WT": run_stage(tmp_path, StageSpec("evaluate", 1, {}, {}), lambda _: {})},
        benchmark=timed,
    )
    (row,) = comparison_rows([result], [], seed=0)
    expected = {
        f"{found.phase}_speedup": found.speedup
        for found in throughput_rows(timed)
        if (found.rules, found.prompt_tokens, found.batch_size) == ("natural", 24, 2)
    }
    for name in ("prefill_speedup", "decode_speedup"):
        assert row.metrics[name] == expected[name]
    assert len({found.speedup for found in throughput_rows(timed)}) > len(PROMPTS)
