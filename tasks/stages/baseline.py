"""Stage ``baseline``: a baseline measured where the checkpoint's merge module is measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tasks.cluster.lease import ClusterLease
from tasks.cluster.worker_tasks import call_on_worker
from tasks.run.stage import Artifact, Metrics, StageSpec, run_stage
from tasks.stages.distill import dtype_key
from tasks.stages.evaluate import TextsJob, rows_of, text_metrics
from umim_core.baselines.methods import BASELINES, EvictedColumns, MergedSpans
from umim_core.checkpoint.checkpoint_files import resolve_checkpoint
from umim_core.config.evaluate import EvaluateConfig
from umim_core.config.recipe import BackboneDtype, Device
from umim_core.evaluation.method_scoring import EvictedScorer, merged_by, method_scorer
from umim_core.evaluation.perplexity import compare_second_halves
from umim_core.evaluation.scoring import Scorer
from umim_core.model.umim import UMIM
from umim_core.store.artifacts import directory_digest


def baseline_stage(
    root: Path,
    lease: ClusterLease,
    tokenized: Artifact,
    checkpoint: Path | str,
    name: str,
    config: EvaluateConfig,
    segment_length: int,
    device: Device = "cpu",
    dtype: BackboneDtype = "float32",
) -> Artifact:
    """Measure a baseline at the token reduction that a checkpoint's rules have, text by text.

    A baseline that merges spans has what stage ``evaluate`` measures, in the same states; so has
    one that drops columns while a text is read, as ``cache_reduction``, its prompts raw. All have
    the perplexity of raw second halves after shortened first halves, with UMIM's own and the base
    model's. What is not defined for a method is left out: a text without some of its tokens, or cut
    by what stands behind a unit, has no two-stage perplexity and no aligned rows. Accuracy is
    measured by stage ``task-score``.
    """
    directory = resolve_checkpoint(checkpoint).resolve()
    spec = StageSpec(
        "baseline",
        1,
        {
            "method": name,
            **config.model_dump(exclude={"task_questions"}),
            "segment_length": segment_length,
            "device": device,
            **dtype_key(dtype),
        },
        {"tokens": tokenized.digest, "checkpoint": directory_digest(directory)},
    )

    def build(_: Path) -> Metrics:
        place = TextsJob(tokenized, directory, config, segment_length, device, dtype)
        return call_on_worker(lease, measure_baseline, BaselineJob(name, place))

    return run_stage(root, spec, build)


@dataclass(frozen=True)
class BaselineJob:
    """A baseline by name, and where and on what it is measured."""

    name: str
    at: TextsJob


def measure_baseline(job: BaselineJob) -> Metrics:
    """Load a checkpoint and measure a baseline in its place; see ``baseline_stage``."""
    at = job.at
    config, length = at.config, at.segment_length
    umim = UMIM.from_pretrained(at.checkpoint, dtype=at.dtype, device=at.device).compressed
    method = BASELINES.find(job.name)(umim.backbone, umim.require_matcher())
    metrics: Metrics = {}
    if isinstance(method, MergedSpans) and not method.whole_texts:
        metrics = text_metrics(at.tokenized, merged_by(method, umim), config, length)
    elif isinstance(method, EvictedColumns) and method.states is not None:
        of_texts = text_metrics(at.tokenized, umim, config, length, method.states)
        metrics = {
            name.replace("token_reduction", "cache_reduction"): value
            for name, value in of_texts.items()
        }
    scorers = {
        "base": Scorer(umim.base(), "prompt", length),
        "own": Scorer(umim, "prompt", length),
        "umim": (scorer := method_scorer(method, umim, length)),
    }
    rows = rows_of(at.tokenized, "test", length, config.perplexity_rows, config.segments)
    for side, half in compare_second_halves(rows, scorers, config.batch_size).items():
        metrics[f"ppl_half_{side}"] = half.read.ppl
    if isinstance(scorer, EvictedScorer):
        metrics.setdefault("cache_reduction", scorer.columns.token_reduction)
    else:
        metrics.setdefault("token_reduction", scorer.contexts.token_reduction)
    return metrics
