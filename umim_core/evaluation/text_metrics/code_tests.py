"""Unit tests of generated code: the prompt's function, completed, must pass the row's tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from umim_core.evaluation.sandbox.code_sandbox import run_confined
from umim_core.evaluation.text_metrics.pass_at_k import PASS_FIGURES, pass_figures
from umim_core.evaluation.text_metrics.text_metric import add_text_metric


@add_text_metric("code_tests", *PASS_FIGURES, runs_code=True)
def code_tests(texts: Sequence[str], row: Mapping[str, Any]) -> dict[str, float]:
    """Return pass@k: every answer runs behind its prompt, in the sandbox.

    The row's ``test`` defines ``check``, which gets the function that ``entry_point`` names.

    Raises:
        EvaluationError: If this machine cannot confine a process.

    Source: HumanEval (Chen et al., 2021).
    """
    check = f"\n{row['test']}\ncheck({row['entry_point']})\n"
    return pass_figures([run_confined(row["prompt"] + text + check).passed for text in texts])
