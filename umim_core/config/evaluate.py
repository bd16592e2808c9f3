"""Amounts of held-out data that a recipe measures on, and a task's questions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from umim_core.config.model_base import Model

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
    new_tokens: Annotated[int, Field(ge=2)] = 32
    warmup: Annotated[int, Field(ge=0, description="Untimed runs of each side.")] = 2
    pairs: Annotated[int, Field(ge=1, description="Alternating base/UMIM pairs.")] = 10
    batch_sizes: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)] = Field(
        (1,), description="Rows generated side by side."
    )
    token_reductions: tuple[Reduction, ...] = Field(
        (0.5,),
        description="Token reductions of fixed pairs (above 0.5: fours); several make a "
        "break-even table, none times the checkpoint's rules alone.",
    )


class EvaluateConfig(Model):
    """Amounts of held-out data to measure on."""

    alignment_rows: Annotated[int, Field(ge=1, description="Test segments for alignment.")] = 64
    perplexity_rows: Annotated[int, Field(ge=1, description="Test segments for perplexity.")] = 24
    task_questions: Annotated[int, Field(ge=1, description="Test questions of the task.")] = 200
    batch_size: Annotated[int, Field(ge=1)] = 8
    segments: Segments = Field(
        default="first",
        description="Which test segments: the first of a split, or at even distances.",
    )


class TaskSizes(Model):
    """Questions per split of a task."""

    train: Annotated[int, Field(ge=1)] = 400
    valid: Annotated[int, Field(ge=1)] = 100
    test: Annotated[int, Field(ge=1)] = 200


class HeadlineConfig(Model):
    """A shipped checkpoint of a larger model, measured on amounts of its own."""

    checkpoint: str = Field(description="Embedded name, directory or hub repository.")
    beside: tuple[str, ...] = Field(
        default=(), description="Others of its backbone, measured as it is and shown next."
    )
    evaluate: EvaluateConfig = EvaluateConfig()
    benchmark: BenchmarkConfig | None = None
