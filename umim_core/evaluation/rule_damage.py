"""Measurement of each rule's damage: the divergence from the base model that follows its merges.

Every state that decoding passes through (``merging.decode_states``) is compared with the base
model's after the same raw tokens. Its KL goes, undivided, to the last merged unit of the state, if
that is among its last W units; a state without one there goes to no rule. With the ids a b c d e f
g h, the rules (b, c) and (f, g) and W = 3::

    state after      a   a b   a bc   a bc d   a bc d e   a bc d e f   a bc d e fg   ... fg h
    goes to          -   -     bc     bc       bc         -            fg            fg
    an occurrence              bc                                      fg

So a merge pays for its own end and for what it spoils shortly after, until the next merge, W states
in all. Farther states diverge, too, but by all merges before them; whose they are is not known.
Within a longer span, states end in the smaller rules that it begins with: these occur there, too,
though the whole text does not save by them.

Shapes: B rows, T raw tokens of the longest, M different spans, R rules, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from umim_core.errors import EvaluationError, NumericalError, require
from umim_core.evaluation.alignment import logit_pairs, row_divergence
from umim_core.merging.decode_states import BranchLayout, branch_layout
from umim_core.merging.likelihood import check_ids
from umim_core.merging.merged_model import MergedModel
from umim_core.rules.damage_table import DamageOrigin, DamageTable
from umim_core.store.artifacts import sha256_bytes

WINDOW: Final = 4  # states: a merge's own, and three raw tokens after it


@torch.no_grad()
def measure_damage(
    rows: Sequence[NDArray[np.integer]],
    merged_model: MergedModel,
    *,
    window: int = WINDOW,
    batch_size: int = 8,
    progress: Callable[[int], object] = lambda tokens: None,
) -> DamageTable:
    """Measure what every rule of a model costs on a text of raw ids [T_b], in one pass.

    A merge pays for ``window`` states, its own included. ``progress`` is called with the number of
    raw tokens done so far.
    """
    backbone, matcher = merged_model.backbone, merged_model.require_matcher()
    check_ids(rows, backbone.vocab_size)
    rules = matcher.rules
    occurrences, merges = (np.zeros(len(rules), dtype=np.int64) for _ in range(2))
    kl = np.zeros(len(rules))
    tokens = 0
    for first in range(0, len(rows), batch_size):
        part = rows[first : first + batch_size]
        layout = branch_layout(merged_model.pack(part), matcher, merged_model.unit_positions)
        tokens += sum(map(len, part))
        if len(layout.span_ids):
            spans, lengths = layout.span_ids.cpu().numpy(), layout.span_lengths.cpu().numpy()
            places = np.empty(len(spans), dtype=np.int64)
            for n in np.unique(lengths):
                places[lengths == n] = rules.places(spans[lengths == n, :n])
            kl[places] += _divergence(part, layout, window, merged_model)
            for counted, states in (
                (occurrences, layout.surrogate),
                (merges, layout.surrogate.masked_fill(~layout.trunk, -1)),
            ):
                counts = states[states >= 0].bincount(minlength=len(places))
                counted[places] += counts.cpu().numpy()
        progress(tokens)
    rule = "some rule must match in the text"
    remedy = "Use text like what rules were mined on."
    value = f"{len(rows)} rows without a match"
    require(bool(merges.any()), EvaluationError, rule, value, remedy)
    rule, remedy = "every divergence must be finite", "Check the module's weights."
    require(bool(np.isfinite(kl).all()), NumericalError, rule, float(kl.sum()), remedy)
    origin = DamageOrigin(
        backbone=backbone.name,
        backbone_fingerprint=backbone.fingerprint,
        module_digest=merged_model.require_module().digest(),
        unit_positions=merged_model.unit_positions,
        text_digest=text_digest(rows),
        tokens=tokens,
        rows=len(rows),
        window=window,
    )
    return DamageTable(rules, occurrences, merges, kl, origin)


def text_digest(rows: Sequence[NDArray[np.integer]]) -> str:
    """Return the SHA-256 of the ids of all rows, one after the other, as int32."""
    return sha256_bytes(np.concatenate(rows).astype(np.int32).tobytes())


def payers(layout: BranchLayout, window: int) -> Tensor:
    """Return the span that each state's divergence goes to [B, T]: a row of ``span_ids``, or -1."""
    columns = torch.arange(layout.lengths.shape[1], device=layout.lengths.device)
    seen = columns.expand_as(layout.lengths)
    spans = torch.full_like(layout.surrogate, -1)
    for _ in range(window):
        spans = torch.where(spans < 0, layout.surrogate.gather(1, seen), spans)
        before = seen - layout.lengths.gather(1, seen)
        seen = torch.where(before < 0, seen, before)  # the first unit of a row has none before it
    return spans


def _divergence(
    rows: Sequence[NDArray[np.integer]],
    layout: BranchLayout,
    window: int,
    merged_model: MergedModel,
) -> NDArray[np.float64]:
    """Return the sum of the divergence that goes to each span of a batch [M]."""
    paying = payers(layout, window)
    paid = paying >= 0
    spans = paying[paid]
    sums = torch.zeros(len(layout.span_ids), dtype=torch.float64, device=paying.device)
    pairs = logit_pairs(rows, layout, paid, merged_model)
    for teacher, student, chunk in pairs:
        sums.index_add_(0, spans[chunk], row_divergence(teacher, student))
    return sums.cpu().numpy()
