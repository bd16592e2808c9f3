"""The log-probability of every raw token of compressed rows, in one forward.

The paper's two-stage accounting runs one forward per token hidden in a span. Here column t of a
single forward holds what decoding would have fed after x_0 .. x_t, and predicts x_{t+1}; see
``decode_states``. With the ids a b c d e and the rule (b, c, d)::

    column t       0    1    2    3          (the last token is never an input)
    embedding      a    b    c    z(bcd)
    part           trunk  branch    trunk
    position       0    1    2    1          a branch goes on from its span's trunk position
    predicts       b    c    d    e
    sees           a    a b  a b c  a z      the trunk never sees branches

(ours) The listing cuts the whole text first, and leaves the tokens within a span raw. Where one
rule lies inside another, its state before a token then depends on that token, and its figures are
no likelihood: they add up to more than 1 over all texts. The states here are those that decoding
passes through; where no rule lies inside another they are the listing's.

Shapes: B rows, T raw tokens, L = T - 1 columns of the longest row, d embedding size, V vocabulary.
Source: paper, "Perplexity Evaluation" (listing "Two-Stage Token-Level PPL Accounting").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from umim_core.backbone.backbone import Backbone
from umim_core.errors import EvaluationError, NumericalError, require
from umim_core.merging.decode_states import BranchLayout, branch_layout
from umim_core.merging.merged_model import MergedModel
from umim_core.rules.matcher import Parts
from umim_core.text.token_ids import AnyInts, id_array

_HEAD_BYTES: Final = 64 << 20  # logits held at once: 128 rows of 128k float32 entries


@dataclass(frozen=True)
class TokenScores:
    """Scores of n consecutive targets.

    Attributes:
        log_probs: log p(target | what stands before it) [n] (float32; float64 for a float64 model).
        greedy: Whether the target is the model's most probable token [n] (bool).
    """

    log_probs: Tensor
    greedy: Tensor


@torch.no_grad()
def score_rows(
    rows: Sequence[AnyInts],
    merged_model: MergedModel,
    given: Sequence[int] | None = None,
    parts: Sequence[Parts | None] | None = None,
) -> list[TokenScores]:
    """Score x_{t+1} given the compressed x_0 .. x_t for the targets of every row, in one forward.

    Rows are raw ids [T_b], at least one token each; ``given`` leading tokens of each are not
    scored, 1 if None. Rules apply to the ``parts`` of each row but its last token; None for
    everywhere.

    Returns:
        Per row its T_b - given scores.
    """
    check_rows(rows, merged_model.backbone.vocab_size)
    if max(len(row) for row in rows) < 2:
        nothing = TokenScores(torch.zeros(0), torch.zeros(0, dtype=torch.bool))
        return [nothing for _ in rows]
    inputs = [np.asarray(row)[:-1] for row in rows]
    packed = merged_model.pack(inputs, parts)
    matcher = None if merged_model.matcher is None else merged_model.require_matcher()
    layout = branch_layout(packed, matcher, merged_model.unit_positions)
    width = layout.trunk.shape[1]
    ids = np.zeros((len(rows), width + 1), dtype=np.int64)
    scored = np.zeros((len(rows), width), dtype=bool)
    for b, (row, leading) in enumerate(zip(rows, given or [1] * len(rows), strict=True)):
        ids[b, : len(row)] = row
        scored[b, leading - 1 : len(row) - 1] = True
    tokens = torch.from_numpy(ids).to(merged_model.backbone.device)
    targets = torch.from_numpy(scored).to(tokens.device)
    hidden = state_hidden(tokens[:, :-1], layout, merged_model)
    scores = target_scores(hidden[targets], tokens[:, 1:][targets], merged_model.backbone)
    return split_scores(scores, scored.sum(axis=1).tolist())


def token_log_probs(rows: Sequence[AnyInts], merged_model: MergedModel) -> list[Tensor]:
    """Return log p(x_{t+1} | compressed x_0 .. x_t) for every target; see ``score_rows``.

    Per row these are T_b - 1 numbers (float64, CPU); entry t belongs to raw token t + 1.
    """
    scored = score_rows(rows, merged_model)
    return [scores.log_probs.cpu().double() for scores in scored]


def check_rows(rows: Sequence[AnyInts], vocab_size: int) -> None:
    sizes = [np.size(row) for row in rows]
    rule = "every row must hold at least one token"
    require(min(sizes, default=0) > 0, EvaluationError, rule, sizes, "Drop empty rows.")
    check_ids(rows, vocab_size)


def check_ids(rows: Sequence[AnyInts], vocab_size: int) -> None:
    for b, row in enumerate(rows):
        id_array(row, vocab_size, f"row {b}: ", EvaluationError)


def state_hidden(tokens: Tensor, layout: BranchLayout, merged_model: MergedModel) -> Tensor:
    """Return the hidden states after every state that decoding passes through [B, L, d].

    Tokens are raw ids [B, L] (int64), right-padded; ``layout`` has their states.
    """
    backbone, columns = merged_model.backbone, layout.positions.shape[1]
    highest = int(layout.positions.max())
    remedy = "Cut the text into shorter windows."
    backbone.check_positions("rows", highest + 1, EvaluationError, remedy)
    if not layout.plain:  # a mask of ours takes the place of the backbone's own windows
        backbone.check_window(columns)
    trunk, merged = merged_model.trunk, layout.surrogate >= 0
    states = trunk.raw_states(tokens)
    if merged_model.merge_depth:
        ends = torch.arange(columns, device=tokens.device).expand_as(tokens)
        states = merged_model.states_of(tokens, states, ends, layout.lengths)
    elif len(layout.span_ids):
        pooled = merged_model.surrogates(layout.span_ids, layout.span_lengths)
        states[merged] = pooled[layout.surrogate[merged]]
    if layout.plain:  # causal attention, right padding included
        return trunk.hidden(states, merged)
    return trunk.hidden(states, merged, layout.mask(states.dtype), layout.positions)


def target_scores(hidden: Tensor, targets: Tensor, backbone: Backbone) -> TokenScores:
    """Score targets [R] by the hidden rows [R, d] that predict them; bounded memory for logits."""
    rows = max(1, _HEAD_BYTES // (4 * backbone.vocab_size))
    log_probs, greedy = [], []
    for chunk, ids in zip(torch.split(hidden, rows), torch.split(targets, rows), strict=True):
        logits = backbone.head(chunk)
        wide = widened(logits)
        log_probs.append(torch.log_softmax(wide, dim=-1).gather(-1, ids[:, None])[:, 0])
        greedy.append(wide.detach().argmax(dim=-1) == ids)
    return TokenScores(torch.cat(log_probs), torch.cat(greedy))


def widened(logits: Tensor) -> Tensor:
    """Return logits in float32, as transformers scores; float64 keeps its precision."""
    return logits if logits.dtype == torch.float64 else logits.float()


def finite_sum(log_probs: Tensor) -> float:
    """Return the sum of log-probabilities [n] (nats), added up in float64."""
    total = float(log_probs.cpu().double().sum())
    rule, remedy = "every log-probability must be finite", "Check the weights of module and model."
    require(math.isfinite(total), NumericalError, rule, total, remedy)
    return total


def split_scores(scores: TokenScores, sizes: list[int]) -> list[TokenScores]:
    parts = zip(
        torch.split(scores.log_probs, sizes), torch.split(scores.greedy, sizes), strict=True
    )
    return [TokenScores(*part) for part in parts]
