"""Metrics of answers: string matching, unit tests of code, answers of contests.

A metric takes the texts that answer one question and the question's row, and returns its figures,
the mean over the texts. Tasks name metrics (``GenerationSet.metrics``); ``registry`` has them all.
lm-eval takes the mean over questions and its standard error.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from math import comb
from typing import Any, Final

from umim_core.evaluation.sandbox.code_sandbox import run_confined


def mean_figures(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}


_ARTICLES: Final = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION: Final = str.maketrans("", "", string.punctuation)


def recall(texts: Sequence[str], row: Mapping[str, Any]) -> dict[str, float]:
    """Return the share of the references that occur in a text, in any case of letters.

    Source: RULER (Hsieh et al., 2024), ``string_match_all``.
    """
    references = [reference.lower() for reference in row["references"]]
    return mean_figures(
        [{"recall": sum(w in text.lower() for w in references) / len(references)} for text in texts]
    )


def substring_match(texts: Sequence[str], row: Mapping[str, Any]) -> dict[str, float]:
    """Return 1 if a reference occurs in a text, both normalised, else 0.

    Source: Lost in the Middle (Liu et al., 2024), ``best_subspan_em``.
    """
    references = [normalised(reference) for reference in row["references"]]
    return mean_figures(
        [
            {"substring_match": float(any(w in normalised(text) for w in references))}
            for text in texts
        ]
    )


def exact_match(texts: Sequence[str], row: Mapping[str, Any]) -> dict[str, float]:
    """Return 1 if a text is a reference, both normalised, else 0."""
    references = [normalised(reference) for reference in row["references"]]
    return mean_figures([{"exact_match": float(normalised(text) in references)} for text in texts])


def normalised(text: str) -> str:
    """Return a text in lower case, without punctuation, articles and surplus spaces.

    A text of nothing else keeps its articles, or its punctuation: as an empty string it would occur
    in every answer.

    Source: SQuAD (Rajpurkar et al., 2016), the evaluation script.
    """
    plain = text.lower().translate(_NO_PUNCTUATION)
    words = _ARTICLES.sub(" ", plain).split() or plain.split() or text.lower().split()
    return " ".join(words)


PASS_ORDERS: Final = (1, 4, 8, 16)
PASS_FIGURES: Final = tuple(f"pass@{k}" for k in PASS_ORDERS)


def pass_at_k(answers: int, right: int, k: int) -> float:
    """Estimate pass@k of a question without bias: 1 - C(n - c, k) / C(n, k).

    ::

        n = 4 answers, c = 1 right, k = 2:  3 of 6 pairs hold the right one, 1 - 3/6 = 0.5

    Source: Chen et al., 2021, "Evaluating Large Language Models Trained on Code", equation 1.
    """
    return 1.0 - comb(answers - right, k) / comb(answers, k)


def pass_figures(right: Sequence[bool]) -> dict[str, float]:
    """Return pass@k by name, for every order that there are answers for."""
    answers, correct = len(right), sum(right)
    return {f"pass@{k}": pass_at_k(answers, correct, k) for k in PASS_ORDERS if k <= answers}


def code_tests(texts: Sequence[str], row: Mapping[str, Any]) -> dict[str, float]:
    """Return pass@k: every answer runs behind its prompt, in the sandbox.

    The row's ``test`` defines ``check``, which gets the function that ``entry_point`` names.

    Source: HumanEval (Chen et al., 2021).
    """
    check = f"\n{row['test']}\ncheck({row['entry_point']})\n"
    return pass_figures([run_confined(row["prompt"] + text + check).passed for text in texts])


def contest_answer(texts: Sequence[str], row: Mapping[str, Any]) -> dict[str, float]:
    r"""Return pass@k of all answers to a problem, as lm-eval's AIME tasks judge each.

    The answer is the last ``\boxed{...}``; it is a whole number, of which ``27.0`` is a spelling.
    """
    from lm_eval.tasks.aime.utils import process_results

    (reference,) = row["references"]
    problem = {"answer": reference.removesuffix(".0")}
    return pass_figures([process_results(problem, [text])["exact_match"] == 1 for text in texts])
