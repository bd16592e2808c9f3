"""Questions and cues of the prompts of lm-eval requests.

Known of the tasks of ``umim_core.task_sets``, and of lm-eval's own that read the same data.
"""

from __future__ import annotations

from lm_eval.api.instance import Instance

from umim_core.evaluation.scored_requests import UNKNOWN, Asked
from umim_core.task_sets.choice_sets import CHOICE_SETS
from umim_core.task_sets.generation_spec import GENERATION_TASKS
from umim_core.task_sets.spec import TASKS, cue_of


def asked_by(request: Instance) -> Asked:
    """Return what a request asks; ``UNKNOWN`` of a task that is none of ours."""
    name, row = request.task_name, request.doc
    if name in GENERATION_TASKS.names():
        return Asked(
            row["question"], row["answer_prefix"] or cue_of(GENERATION_TASKS.find(name).prompt)
        )
    if name in TASKS.names():
        return Asked(row["context"], TASKS.find(name).form.cue)
    for own in CHOICE_SETS:
        if own.name == name:
            return Asked(own.read(row).context, own.form.cue)
    return UNKNOWN
