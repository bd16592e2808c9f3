"""Multiple-choice data sets of the paper: PIQA, COPA, OpenBookQA, ARC and HellaSwag.

Questions come from a file ``piqa.jsonl`` or ``piqa_*.jsonl`` (and so on) in the folder that
``UMIM_TASK_DATA`` names, one ``{"id", "context", "choices", "gold"}`` a line; without a folder they
come from the data set of the hub that lm-eval's task of this name reads. Prompts are lm-eval's. The
headline is the paper's accuracy, ``acc_seq``; see ``evaluation.tasks.sequence_task``.

Source: paper, "Multiple-Choice QA"; prompts and fields from lm_eval 0.4.13, ``lm_eval/tasks``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from umim_core.embedded.documents import write_rows
from umim_core.errors import CorpusError
from umim_core.store.artifacts import canonical_json, sha256_bytes
from umim_core.task_sets.choice_questions import Question, read_questions
from umim_core.task_sets.spec import QuestionForm, TaskSet, TaskSplit, add_task
from umim_core.task_sets.task_files import DATA_VARIABLE, find_data_file, task_folder
from umim_core.text.hub_dataset import open_hub_dataset

Row = Mapping[str, Any]
_ASKED: Final = QuestionForm("Question: {context}\nAnswer:")
_COPA_LINKS: Final = {"cause": "because", "effect": "therefore"}
_BRACKETS: Final = re.compile(r"\[.*?\]")


@dataclass(frozen=True)
class ChoiceSet:
    """A data set: where the hub has it, and how a row of it is read.

    Attributes:
        name: As its file begins.
        hub: Repository, configuration and split on the hub.
        read: Makes a question of a row of the hub.
        chance: Accuracy of guessing, 0..1.
        form: Prompt, delimiter and merged part.
    """

    name: str
    hub: tuple[str, str | None, str]
    read: Callable[[Row], Question]
    chance: float
    form: QuestionForm

    def questions(self) -> list[Question]:
        """Read all questions, of the file or of the hub.

        Raises:
            CorpusError: If the folder that ``UMIM_TASK_DATA`` names has no file of this set, or one
                that breaks the schema; or without a folder, if the hub cannot be reached or has
                other fields.
        """
        if folder := task_folder(None):
            return read_questions(find_data_file(self.name, folder))
        try:
            return [self.read(row) for row in open_hub_dataset(*self.hub)]
        except CorpusError as error:
            raise CorpusError(
                error.rule,
                error.value,
                f"Or set {DATA_VARIABLE} to a folder with {self.name}.jsonl. {error.remedy}",
            ) from error
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise CorpusError(
                f"rows of {self.hub[0]!r} must have the fields that lm-eval's task reads",
                f"{type(error).__name__}: {error}",
                f"Set {DATA_VARIABLE} to a folder with {self.name}.jsonl.",
            ) from error

    def sources(self) -> list[list[str]]:
        """Return the set's name and the digest of its questions."""
        return [[self.name, sha256_bytes(canonical_json(_rows(self.questions())).encode())]]

    def write(self, out: Path, sizes: Mapping[TaskSplit, int] | None, corpus: Path | None) -> None:
        """Write ``test.jsonl``; see ``TaskSet``."""
        limit = None if sizes is None else sizes["test"]
        write_rows(out / "test.jsonl", _rows(self.questions()[:limit]))


def _rows(questions: Sequence[Question]) -> list[dict[str, object]]:
    return [
        {
            "id": q.id or str(number),
            "context": q.context,
            "choices": list(q.choices),
            "gold": q.gold,
        }
        for number, q in enumerate(questions)
    ]


def read_piqa(row: Row) -> Question:
    """Read a row of PIQA: a goal and two ways to it."""
    return Question(row["goal"], (row["sol1"], row["sol2"]), int(row["label"]))


def read_copa(row: Row) -> Question:
    """Read a row of COPA: a premise that loses its full stop to ``because`` or ``therefore``."""
    choices = (row["choice1"], row["choice2"])
    return Question(
        f"{row['premise'].strip()[:-1]} {_COPA_LINKS[row['question']]}",
        tuple(choice[0].lower() + choice[1:] for choice in choices),
        int(row["label"]),
    )


def read_lettered(row: Row, field: str = "question") -> Question:
    """Read a row of ARC, or of OpenBookQA: choices under letters, one of which is the key."""
    choices = row["choices"]
    gold = list(choices["label"]).index(row["answerKey"].strip())
    return Question(row[field], tuple(choices["text"]), gold, str(row.get("id", "")))


def read_hellaswag(row: Row) -> Question:
    """Read a row of HellaSwag: an activity, what came before, and four ways to go on."""
    begun = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
    return Question(_plain(begun), tuple(map(_plain, row["endings"])), int(row["label"]))


def _plain(text: str) -> str:
    """Remove the marks of WikiHow, as lm-eval does."""
    text = text.strip().replace(" [title]", ". ")
    return _BRACKETS.sub("", text).replace("  ", " ")


CHOICE_SETS: Final = (
    ChoiceSet("piqa", ("baber/piqa", None, "validation"), read_piqa, 1 / 2, _ASKED),
    ChoiceSet("copa", ("aps/super_glue", "copa", "validation"), read_copa, 1 / 2, QuestionForm()),
    ChoiceSet(
        "openbookqa",
        ("allenai/openbookqa", "main", "test"),
        partial(read_lettered, field="question_stem"),
        1 / 4,
        QuestionForm(),
    ),
    ChoiceSet("arc_easy", ("allenai/ai2_arc", "ARC-Easy", "test"), read_lettered, 1 / 4, _ASKED),
    ChoiceSet(
        "arc_challenge", ("allenai/ai2_arc", "ARC-Challenge", "test"), read_lettered, 1 / 4, _ASKED
    ),
    ChoiceSet(
        "hellaswag", ("Rowan/hellaswag", None, "validation"), read_hellaswag, 1 / 4, QuestionForm()
    ),
)

for _set in CHOICE_SETS:
    add_task(
        TaskSet(
            name=f"umim_{_set.name}",
            write=_set.write,
            chance=_set.chance,
            form=_set.form,
            data=_set.name,
            metrics=("acc_seq", "acc", "acc_norm"),
            splits=("test",),
            sources=_set.sources,
        )
    )
