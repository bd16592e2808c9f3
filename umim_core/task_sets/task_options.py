"""Options of generation tasks, as lm-eval's ``--metadata`` passes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final, Self

from umim_core.errors import ConfigError, did_you_mean

_PREFIX: Final = "task_"
_LEAST: Final = {"task_seed": 0, "task_questions": 1, "task_new_tokens": 1}
_OTHERS: Final = {"task_data", "task_features"}  # of tasks that are not generated


@dataclass(frozen=True)
class TaskOptions:
    """Options of one call, for all of its tasks.

    Attributes:
        task_seed: Seed of generated questions.
        task_questions: Most questions per task; 100 if None.
        task_new_tokens: Most tokens of an answer, instead of the task's own number.

    Raises:
        ConfigError: If a number is out of bounds.
    """

    task_seed: int = 0
    task_questions: int | None = None
    task_new_tokens: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), _LEAST[field.name]
            if value is None and field.default is None:
                continue
            if type(value) is not int or value < least:
                raise ConfigError(
                    f"{field.name} must be a whole number of at least {least}", value, "Correct it."
                )

    @classmethod
    def read(cls, metadata: Mapping[str, object]) -> Self:
        """Take the options out of a task's metadata, where model arguments stand too.

        Raises:
            ConfigError: If a name that begins with ``task_`` is unknown, or a value out of bounds.
        """
        known = {field.name for field in fields(cls)}
        options = {name: value for name, value in metadata.items() if name.startswith(_PREFIX)}
        options = {name: value for name, value in options.items() if name not in _OTHERS}
        for name in options.keys() - known:
            raise ConfigError(
                f"an option of tasks must be one of {', '.join(sorted(known))}",
                name,
                did_you_mean(name, known) or "Leave it out.",
            )
        return cls(**options)  # type: ignore[arg-type]  # __post_init__ checks the values
