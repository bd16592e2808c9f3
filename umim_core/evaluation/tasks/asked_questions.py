"""Questions and cues of the prompts of lm-eval requests.

Known of the tasks of ``umim_core.task_sets``, and of lm-eval's tasks in the tables of the paper.
"""

from __future__ import annotations

from typing import Final

from lm_eval.api.instance import Instance

from umim_core.evaluation.scored_requests import UNKNOWN, Asked
from umim_core.task_sets.generation_spec import GENERATION_TASKS
from umim_core.task_sets.spec import TASKS, cue_of

_OWN: Final = "umim_"
# Column of the question, by the name of lm-eval's task; its cue stands behind it in the prompt.
_COLUMNS: Final = {
    "aime24": "Problem",
    "amc23": "question",
    "arc_challenge": "question",
    "arc_easy": "question",
    "gsm8k_cot_zeroshot": "question",
    "hellaswag": "query",
    "longbench_qmsum": "question",
    "openbookqa": "question_stem",
    "piqa": "goal",
    "qmsum": "question",
}


def asked_by(request: Instance) -> Asked:
    """Return what a request asks; ``UNKNOWN`` of a task that neither we nor the paper have."""
    name, row, context = request.task_name, request.doc, str(request.args[0])
    if name in GENERATION_TASKS.names():
        return Asked(
            row["question"], row["answer_prefix"] or cue_of(GENERATION_TASKS.find(name).prompt)
        )
    if name in TASKS.names():
        return Asked(row["context"], TASKS.find(name).form.cue)
    stock = str(name).removeprefix(_OWN)
    if stock == "copa":  # the sentence that is to be continued
        return Asked(context or row["premise"])
    question = row.get(_COLUMNS.get(stock, ""))
    if not isinstance(question, str) or (context and question not in context):
        return UNKNOWN
    return Asked(question, context.rpartition(question)[2])
