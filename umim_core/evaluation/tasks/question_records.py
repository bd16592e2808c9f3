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
        checkpoint: Its directory; the tokens of its backbone, which lies at ``backbone`` if it has
            no name, measure prompts.
        options: Name and value of options of a task that the package generates (``TaskOptions``).
        new_tokens: Most tokens of an answer, and ``answers`` per question; None for the task's own.
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
    """A task's questions as they were found, with their SHA-256, and its metrics that are means.

    A task that is ``not_run``, for that reason, has none. Of a task whose answers are generated,
    limits are most tokens of an answer and answers per question; where the package makes the
    questions, trained context of the backbone, and fewest and most tokens of a prompt.
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
        inputs: Raw tokens and units of contexts and answers, ``contexts`` of contexts alone; zeros
            where nothing was matched.
        prompts: lm-eval's hash of the prompt of each question.
        answers: Generated texts of each question; empty for a task of likelihoods.
        sizes: Raw tokens and units of a question's prompts and answers together, then of its
            prompts alone, [Q][4]; zeros and empty as above.
        columns: Raw tokens of contexts, and columns of the KV cache that stayed of them, if any go.
        shortfall: Tokens or columns that stayed beyond the budget of a baseline; None without one.
    """

    values: dict[str, list[float]]
    inputs: tuple[int, int]
    contexts: tuple[int, int]
    prompts: list[str]
    answers: list[list[str]] = field(default_factory=list)
    sizes: list[list[int]] = field(default_factory=list)
    columns: tuple[int, int] = (0, 0)
    shortfall: int | None = None
