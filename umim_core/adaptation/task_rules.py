"""Task rules: bigrams of a task's training questions, kept by a threshold or within a budget.

One ragged segment per question, so that no bigram joins two questions and padding does not exist;
one counting pass serves every threshold.

Example (one character per token)::

    Question("ab", ("ab", "x"), gold=0)    sequence  a b _ a b     (a,b):2 (b,_):1 (_,a):1
                                           context   a b           (a,b):1

Source: paper, "Task-Specific Merge-Rule Construction".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from umim_core.adaptation.choices import (
    DEFAULT_MAX_LENGTH,
    Encode,
    mining_segments,
    task_sequences,
)
from umim_core.errors import ConfigError
from umim_core.mining.counting import count_ngrams
from umim_core.rules.filters import tau_for_budget
from umim_core.rules.grams import check_tau, select
from umim_core.rules.origin import Containment, Overlap, RuleOrigin
from umim_core.rules.ruleset import RuleSet
from umim_core.store.artifacts import sha256_bytes
from umim_core.task_sets.choice_questions import Question
from umim_core.task_sets.spec import QuestionForm

TASK_ORDER: Final = 2


def mine_task_rules(
    questions: Sequence[Question],
    encode: Encode,
    taus: Sequence[int],
    form: QuestionForm,
    *,
    budget: int | None = None,
    max_length: int = DEFAULT_MAX_LENGTH,
    excluded: Iterable[int] = (),
    overlap: Overlap = "none",
    containment: Containment = "keep",
    tokenizer_fingerprint: str | None = None,
) -> dict[int, RuleSet]:
    """Mine the bigrams of a task once and keep rules for each threshold.

    Args:
        questions: Training questions.
        encode: Text to token ids, without special tokens.
        taus: Least counts; the paper takes 2000, 200, 50, 5 and 1 for HellaSwag, 5 for ARC.
        form: Prompt, delimiter and merged part; bigrams of what may merge are counted.
        budget: Most rules; where a threshold leaves more, it is raised until they fit.
        max_length: Most tokens of a question and one answer; longer ones lose their beginning.
        excluded: Ids that take part in no rule.
        overlap: ``none`` as in the paper, or ``greedy``.
        containment: Of no effect among bigrams; recorded.
        tokenizer_fingerprint: Recorded.

    Returns:
        One rule set per threshold asked for; each says the one it was made with. Their digest of
        the corpus is that of the counted ids.

    Raises:
        ConfigError: If there is no threshold, or the length is out of bounds.
        RuleSetError: If a threshold or the budget is below 1.
    """
    if not taus:
        raise ConfigError("task rules need at least one threshold", "none", "The paper takes 5.")
    for tau in taus:
        check_tau(tau)
    ids, offsets = mining_segments(task_sequences(questions, encode, form, max_length))
    counts = count_ngrams(ids, offsets, min(taus), excluded, max_order=TASK_ORDER)
    digest = sha256_bytes(np.ascontiguousarray(ids, np.int32).tobytes())
    return {
        tau: RuleSet.from_counts(
            counts,
            RuleOrigin(
                tau=tau
                if budget is None
                else tau_for_budget(select(counts, tau), budget, overlap, containment),
                overlap=overlap,
                containment=containment,
                tokenizer_fingerprint=tokenizer_fingerprint,
                corpus_digest=digest,
            ),
        )
        for tau in taus
    }
