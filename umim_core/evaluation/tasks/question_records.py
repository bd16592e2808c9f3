"""Records of a task's questions and of the scores of a shard, for code without lm-eval."""

from __future__ import annotations

from dataclasses import dataclass, field

Limits = dict[str, int | list[int] | None]


@dataclass(frozen=True)
class QuestionSource:
    """A task by name, where its data lie, and limits of its answers where they are generated.

    Attributes:
        task: Name of a task of ``task_sets``, of a YAML file of this package, or of lm-eval.
        hub: Folder that stands for the hub; None asks the hub, or its cache.
        folder: Folder of the questions of a task of ``task_sets``; None: its own source.
        digest: Digest of the folder that is named; what is kept of its content is kept by it.
        checkpoint: Directory of the checkpoint; the tokens of its backbone measure prompts.
        backbone: Where that backbone lies; None for the name in the checkpoint.
        options: Name and value of options of a task that the package generates (``TaskOptions``).
        new_tokens: Most tokens of an answer; None for the task's number, which is no more.
        answers: Most answers per question, likewise.
        seed: Of sampled answers.
        confirm_run_unsafe_code: Whether answers that are programs may be run.
    """

    task: str
    hub: str | None = None
    folder: str | None = None
    digest: str = ""
    checkpoint: str | None = None
    backbone: str | None = None
    options: tuple[tuple[str, int], ...] = ()
    new_tokens: int | None = None
    answers: int | None = None
    seed: int = 0
    confirm_run_unsafe_code: bool = False


@dataclass(frozen=True)
class QuestionSet:
    """A task's questions as they were found.

    Attributes:
        count: How many there are; 0 for a task that is not run.
        digest: SHA-256 of all of them.
        metrics: Names of the metrics that are means over questions.
        not_run: Reason why the task is not run; None if it is.
        limits: Of a task whose answers are generated: most tokens of an answer (``new_tokens``) and
            answers per question (``answers``); where the package makes the questions, trained
            context of the backbone (``context``), fewest and most tokens of a prompt
            (``prompt_tokens``).
    """

    count: int
    digest: str
    metrics: tuple[str, ...]
    not_run: str | None = None
    limits: Limits = field(default_factory=dict)


@dataclass(frozen=True)
class ShardScores:
    """Scores of a shard.

    Attributes:
        values: Metric -> a value per question.
        inputs: Raw tokens and units of contexts and answers; zeros where nothing was matched.
        contexts: The same of contexts alone.
        prompts: lm-eval's hash of the prompt of each question.
        answers: Generated texts of each question; empty for a task of likelihoods.
        sizes: Raw tokens and units of a question's prompts and answers together, then of its
            prompts alone, [Q][4]; zeros and empty as above.
        columns: Raw tokens of contexts, and columns of the KV cache that stayed of them; zeros
            where none is dropped.
        shortfall: Tokens or columns that stayed of contexts beyond the budget of a baseline; None
            without a baseline.
    """

    values: dict[str, list[float]]
    inputs: tuple[int, int]
    contexts: tuple[int, int]
    prompts: list[str]
    answers: list[list[str]] = field(default_factory=list)
    sizes: list[list[int]] = field(default_factory=list)
    columns: tuple[int, int] = (0, 0)
    shortfall: int | None = None
