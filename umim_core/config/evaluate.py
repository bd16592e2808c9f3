"""Amounts of held-out data that a recipe measures on, and a task's questions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from umim_core.config.benchmark import BenchmarkConfig
from umim_core.config.model_base import LATER, Model, StableDump

Segments = Literal["first", "spread"]
MergedPart = Literal["context", "sequence"]


class EvaluateConfig(Model, StableDump):
    """Amounts of held-out data to measure on."""

    alignment_rows: Annotated[int, Field(ge=1, description="Test segments for alignment.")] = 64
    perplexity_rows: Annotated[int, Field(ge=1, description="Test segments for perplexity.")] = 24
    task_questions: Annotated[int, Field(ge=1, description="Test questions of the task.")] = 200
    batch_size: Annotated[int, Field(ge=1)] = 8
    segments: Annotated[Segments, LATER] = Field(
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
    evaluate: EvaluateConfig = EvaluateConfig()
    benchmark: BenchmarkConfig | None = None
