"""Amounts of held-out data that a recipe measures on, and a task's questions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from umim_core.config.model_base import AtLeast0, AtLeast1, Model

Segments = Literal["first", "spread"]
MergedPart = Literal["context", "sequence"]


RuleKind = Literal["fixed-pairs", "natural"]  # a controlled token reduction; the checkpoint's own
Reduction = Annotated[float, Field(gt=0.0, le=0.75)]


class BenchmarkConfig(Model):
    """Lengths and batch sizes to time, each length at each batch size with all rules.

    The paper's protocol: lengths 256 to 2048, 256 new tokens, 10 warm-ups, 10 pairs, batch size 1,
    fixed pairs at a token reduction of 50 %.
    """

    prompt_lengths: Annotated[tuple[Annotated[int, Field(ge=8)], ...], Field(min_length=1)] = (
        256,
        512,
    )
    """Tokens of prompts before merging."""
    new_tokens: Annotated[int, Field(ge=2)] = 32
    """Tokens generated after each prompt."""
    warmup: AtLeast0 = 2
    """Untimed runs of each side."""
    pairs: AtLeast1 = 10
    """Alternating base/UMIM pairs."""
    batch_sizes: Annotated[tuple[AtLeast1, ...], Field(min_length=1)] = (1,)
    """Rows generated side by side."""
    token_reductions: tuple[Reduction, ...] = Field(
        (0.5,),
        description="Token reductions of fixed pairs (above 0.5: fours); several make a "
        "break-even table, none times the checkpoint's rules alone.",
    )


class EvaluateConfig(Model):
    """Amounts of held-out data to measure on."""

    alignment_rows: AtLeast1 = 64
    """Test segments for alignment."""
    perplexity_rows: AtLeast1 = 24
    """Test segments for perplexity."""
    task_questions: AtLeast1 = 200
    """Test questions of the task."""
    batch_size: AtLeast1 = 8
    """Segments measured at a time."""
    segments: Segments = "first"
    """Which test segments: the first of a split, or at even distances."""


class TaskSizes(Model):
    """Questions per split of a task."""

    train: AtLeast1 = 400
    """Questions to adapt with, at most."""
    valid: AtLeast1 = 100
    """Questions to validate on, at most."""
    test: AtLeast1 = 200
    """Questions to score, at most."""


class HeadlineConfig(Model):
    """A shipped checkpoint of a larger model, measured on amounts of its own."""

    checkpoint: str
    """Embedded name, directory or hub repository."""
    beside: tuple[str, ...] = ()
    """Others of its backbone, measured as it is and shown next."""
    evaluate: EvaluateConfig = EvaluateConfig()
    benchmark: BenchmarkConfig | None = None
