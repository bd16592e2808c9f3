"""Values of scored shards of questions, as plain data that needs no lm-eval."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class QuestionSource:
    """A task by name, and where its data lie.

    Attributes:
        task: Name of a task of ``task_sets``, or of one that lm-eval ships.
        hub: Folder that stands for the hub; None asks the hub, or its cache.
        folder: Folder of the questions of a task of ``task_sets``; None: its own source.
        digest: Digest of the folder that is named; what is kept of its content is kept by it.
    """

    task: str
    hub: str | None = None
    folder: str | None = None
    digest: str = ""


@dataclass(frozen=True)
class QuestionSet:
    """A task's questions as they were found.

    Attributes:
        count: How many there are.
        digest: SHA-256 of all of them.
        metrics: Names of the metrics that are means over questions.
    """

    count: int
    digest: str
    metrics: tuple[str, ...]


@dataclass(frozen=True)
class ShardScores:
    """Scores of a shard.

    Attributes:
        values: Metric -> a value per question.
        inputs: Raw tokens and units of contexts and answers; zeros where nothing was matched.
        contexts: The same of contexts alone.
        prompts: lm-eval's hash of the prompt of each question.
    """

    values: dict[str, list[float]]
    inputs: tuple[int, int]
    contexts: tuple[int, int]
    prompts: list[str]
