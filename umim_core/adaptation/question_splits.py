"""Training, validation and test questions of one task, without a question in two of them.

A data set's own splits stay as they are; a split that it lacks is cut out of the training questions
by the hash of their ids, so that it does not depend on their order. What is also asked in a later
split (train, valid, test) is left out of the earlier one: rules and updates never see a question
that they are measured on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from umim_core.errors import CorpusError
from umim_core.task_sets.choice_questions import Question
from umim_core.task_sets.spec import SPLITS, TaskSplit


def split_questions(
    given: Mapping[TaskSplit, Sequence[Question]], sizes: Mapping[TaskSplit, int]
) -> dict[TaskSplit, list[Question]]:
    """Return three splits of questions, none of which shares a context with another.

    Returns:
        Questions by split. Each is in the order of the hash of its ids.

    Raises:
        CorpusError: If there are no training questions, or a split remains empty.
    """
    if not given.get("train"):
        raise CorpusError("a task must have training questions", "none", "Give their file.")
    left = sorted(given["train"], key=_place)
    splits: dict[TaskSplit, list[Question]] = {}
    taken: set[str] = set()
    for split in reversed(SPLITS):
        source = sorted(given[split], key=_place) if given.get(split) else left
        fresh = [question for question in source if question.context not in taken]
        splits[split] = fresh[: sizes[split]]
        taken |= {question.context for question in splits[split]}
    if empty := [split for split in SPLITS if not splits[split]]:
        raise CorpusError(
            f"the split {empty[0]} must hold questions that no later split asks",
            f"{len(given['train'])} training questions for {dict(sizes)}",
            "Lower the sizes of valid and test, or give more questions.",
        )
    return splits


def _place(question: Question) -> tuple[bytes, str]:
    text = question.id or question.context
    return hashlib.blake2b(text.encode(), digest_size=8).digest(), text
