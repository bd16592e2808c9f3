"""HumanEval: complete a Python function from its signature and docstring; its tests decide.

Answers are run only under lm-eval's ``--confirm_run_unsafe_code``, in the sandbox of
``umim_core.evaluation.sandbox.code_sandbox``. Greedy, one answer; for pass@k with k > 1 give
``task_repeats`` and ``--gen_kwargs do_sample=True,temperature=0.8,top_p=0.95``.

Source: Chen et al., 2021; stop strings as published there; paper, "HumanEval" (pass@1).
"""

from __future__ import annotations

from umim_core.task_sets.generation_spec import GenerationSet, add_generation_task
from umim_core.task_sets.task_files import DataFile, HubTable

add_generation_task(
    GenerationSet(
        name="umim_humaneval",
        prompt="{prompt}",
        source=DataFile(
            "humaneval/HumanEval.jsonl",
            fields=("prompt", "test", "entry_point"),
            reference="canonical_solution",
            origin="the 164 problems of HumanEval",
            id="task_id",
            hub=HubTable("openai/openai_humaneval", "test"),
        ),
        metrics=("code_tests",),
        max_new_tokens=512,
        licence="MIT",
        until=("\nclass", "\ndef", "\n#", "\nif", "\nprint"),
    )
)
