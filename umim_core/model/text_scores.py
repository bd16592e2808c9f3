"""Log-probabilities and perplexity of texts under a compressed model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from umim_core.errors import EvaluationError
from umim_core.merging.compressed import Compressed
from umim_core.merging.continuations import score_continuations
from umim_core.merging.likelihood import finite_sum, token_log_probs

_CONTEXTS_AT_ONCE: Final = 16  # their mask grows with the square of the longest


@torch.no_grad()
def score_texts(
    contexts: Sequence[str],
    continuations: Sequence[Sequence[str]],
    compressed: Compressed,
    add_special_tokens: bool | None = None,
) -> list[list[float]]:
    """Return the log-probability (nats) of each continuation after its context.

    See ``UMIM.score``; ``compressed`` is the model, or its base.
    """
    if any(isinstance(texts, str) for texts in (contexts, continuations, *continuations)):
        raise EvaluationError(
            "contexts are a list of texts, continuations a list of such lists",
            "a text in place of a list",
            "Put it into a list.",
        )
    if len(contexts) != len(continuations):
        raise EvaluationError(
            "every context needs its continuations",
            f"{len(contexts)} contexts, {len(continuations)} lists",
            "Pass one list per context.",
        )

    def ids(text: str, add_special_tokens: bool | None = False) -> NDArray[np.int64]:
        return np.array(compressed.backbone.encode(text, add_special_tokens), dtype=np.int64)

    scored: list[list[float]] = []
    for first in range(0, len(contexts), _CONTEXTS_AT_ONCE):
        part = slice(first, first + _CONTEXTS_AT_ONCE)
        rows = score_continuations(
            [ids(text, add_special_tokens) for text in contexts[part]],
            [[ids(text) for text in row] for row in continuations[part]],
            compressed,
        )
        scored += [[finite_sum(scores.log_probs) for scores in row] for row in rows]
    return scored


def text_perplexity(
    texts: str | Sequence[str] | Sequence[NDArray[np.integer]],
    compressed: Compressed,
    add_special_tokens: bool | None = None,
) -> float:
    """Return exp(mean negative log-probability) over all raw targets, a text at a time.

    See ``UMIM.perplexity``; ``compressed`` is the model, or its base.
    """
    total, targets = 0.0, 0
    for item in [texts] if isinstance(texts, str) else texts:
        ids: object = item
        if isinstance(item, str):
            ids = compressed.backbone.encode(item, add_special_tokens)
        (scores,) = token_log_probs([np.array(ids)], compressed)
        total += finite_sum(scores)
        targets += len(scores)
    if targets == 0:
        raise EvaluationError(
            "perplexity needs at least two tokens", f"{len(texts)} texts", "Pass longer ones."
        )
    return float(np.exp(-total / targets))
