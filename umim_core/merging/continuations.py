"""Score several continuations after one shared, compressed context, in one forward.

Layout of one row with S context units and the continuations y = y1 y2 y3 and z = z1 z2::

    column     0 ... S-1 | S   S+1 | S+2
    input      context   | y1  y2  | z1        the last token of a continuation is never an input
    position   0 ... S-1 | S   S+1 | S         restarted for each continuation; with preserved
                                               positions they go on from the context's raw length
    predicts   ...  y1 z1| y2  y3  | z2        column S-1 predicts the first token of each
    sees       causal    | context, itself     y never sees z

Where every row has one continuation, it stands right behind its context, and plain causal attention
serves: no mask of L x L columns is made.

Shapes: B rows, S context units, L columns, R predicted tokens, d embedding size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from umim_core.backbone.attention_masks import additive_mask
from umim_core.backbone.backbone import Backbone
from umim_core.errors import EvaluationError, require
from umim_core.merging.likelihood import TokenScores, split_scores, target_scores
from umim_core.merging.merged_model import MergedModel
from umim_core.merging.packing import PackedUnits
from umim_core.rules.matcher import Parts
from umim_core.text.token_ids import AnyInts

_PADDING: Final = -1
_CONTEXT: Final = 0
_COLUMNS: Final = 2048  # of a row with several continuations: its mask is [L, L]


def block_mask(groups: Tensor, dtype: torch.dtype) -> Tensor:
    """Build the additive attention mask [B, 1, L, L] of packed rows.

    Groups [B, L] (int64) of columns are -1 for padding, 0 for the context, k >= 1 for continuation
    k. It is 0 where query i may see key j, the lowest finite value elsewhere: a column sees the
    context and its own group up to itself. Nothing sees padding, except a padding column itself,
    which keeps its softmax finite.
    """
    query, key = groups[:, :, None], groups[:, None, :]
    columns = torch.arange(groups.shape[1], device=groups.device)
    causal = columns[None, :] <= columns[:, None]
    allowed = causal & (key != _PADDING) & ((key == _CONTEXT) | (key == query))
    allowed |= columns[None, :] == columns[:, None]
    return additive_mask(allowed, dtype)


def widest_row(units: int, backbone: Backbone) -> int:
    """Return the most columns that a row of several continuations should have.

    Beyond twice its context, or 2,048 columns, the mask is what costs. Columns beyond the window or
    the positions would be right in most backbones, but GPT-Neo counts both by columns.
    """
    return min([max(2 * units, _COLUMNS), *backbone.limits])


@dataclass(frozen=True)
class _Layout:
    """Integer tables of one packed batch.

    Continuations stand right behind their row's own context; L is the longest row.
    """

    groups: Tensor  # [B, L]
    positions: Tensor  # [B, L]
    tail_ids: Tensor  # [B, L] continuation inputs, zero elsewhere
    rows: Tensor  # [R] row of each predicted token
    columns: Tensor  # [R] column that predicts it
    targets: Tensor  # [R]
    sizes: list[int]  # tokens per continuation, in order


def _layout(
    contexts: Sequence[AnyInts], endings: Sequence[Sequence[AnyInts]], device: torch.device
) -> _Layout:
    """Lay out continuations after contexts given as the positions of their units [S_b]."""
    tails = [sum(len(ending) - 1 for ending in row) for row in endings]
    shape = (len(endings), max(len(c) + n for c, n in zip(contexts, tails, strict=True)))
    groups = np.full(shape, _PADDING, dtype=np.int64)
    positions = np.zeros(shape, dtype=np.int64)
    tail_ids = np.zeros(shape, dtype=np.int64)
    rows: list[int] = []
    columns: list[int] = []
    targets: list[int] = []
    for b, row in enumerate(endings):
        units, after = len(contexts[b]), contexts[b][-1] + 1
        groups[b, :units] = _CONTEXT
        positions[b, :units] = contexts[b]
        column = units
        for k, ending in enumerate(row, start=1):
            inputs = len(ending) - 1
            groups[b, column : column + inputs] = k
            positions[b, column : column + inputs] = after + np.arange(inputs)
            tail_ids[b, column : column + inputs] = ending[:-1]
            rows += [b] * len(ending)
            columns += [units - 1, *range(column, column + inputs)]
            targets += [int(token) for token in ending]
            column += inputs

    def table(values: object) -> Tensor:
        return torch.as_tensor(np.asarray(values, dtype=np.int64), device=device)

    sizes = [len(ending) for row in endings for ending in row]
    return _Layout(
        table(groups), table(positions), table(tail_ids), table(rows), table(columns),
        table(targets), sizes,
    )  # fmt: skip


def score_continuations(
    contexts: Sequence[AnyInts],
    endings: Sequence[Sequence[AnyInts]],
    merged_model: MergedModel,
    parts: Sequence[Parts | None] | None = None,
) -> list[list[TokenScores]]:
    """Score raw continuations after contexts that are matched alone and compressed.

    No rule crosses from a context into a continuation; continuation tokens stay raw. What a row has
    no room for (``widest_row``) stands in another, behind the same context; beyond a window every
    continuation does. Forwards have as many rows as there are contexts, at most. Gradients reach
    the module when autograd is on. Contexts [T_b] and continuations are raw ids, at least one token
    each; rules apply to the ``parts`` of each context, None for everywhere.

    Returns:
        Per row, one score per continuation, in order.
    """
    for b, (context, row) in enumerate(zip(contexts, endings, strict=True)):
        require(
            len(context) > 0 and min(map(len, row), default=0) > 0,
            EvaluationError,
            "a context and each of its continuations must hold at least one token",
            f"row {b}: {len(context)} context tokens, endings {[len(e) for e in row]}",
            "Put the BOS token into an empty context and drop empty continuations.",
        )
    backbone, unit_positions = merged_model.backbone, merged_model.unit_positions
    ids = [np.asarray(context, dtype=np.int64) for context in contexts]
    packed = merged_model.pack(ids, parts, merged_model.raw_tail)
    columns = (packed.raw_counts if merged_model.merge_depth else packed.unit_counts).tolist()
    widest = max(c + max(map(len, row)) - 1 for c, row in zip(columns, endings, strict=True))
    # The backbone's own windows are in force where every row of a forward has one continuation.
    alone = backbone.window is not None and widest > backbone.window
    rows = [
        (b, part)
        for b, row in enumerate(endings)
        for part in _fitting(row, columns[b], 0 if alone else widest_row(columns[b], backbone))
    ]
    if len(rows) > len(contexts):
        joined: list[list[TokenScores]] = [[] for _ in contexts]
        for first in range(0, len(rows), len(contexts)):
            some = rows[first : first + len(contexts)]
            of_rows = score_continuations(
                [contexts[b] for b, _ in some],
                [part for _, part in some],
                merged_model,
                None if parts is None else [parts[b] for b, _ in some],
            )
            for (b, _), part_scores in zip(some, of_rows, strict=True):
                joined[b] += part_scores
        return joined
    table, counts = packed.position_ids(unit_positions).cpu().numpy(), packed.unit_counts.tolist()
    positions = [row[:units] for row, units in zip(table, counts, strict=True)]
    causal = all(len(row) == 1 for row in endings)  # each continuation is its row's own end
    _check_length(positions, endings, backbone, causal and unit_positions == "compact")
    if merged_model.merge_depth:  # the layers below it read the same rows raw
        _check_length([np.arange(len(ids)) for ids in contexts], endings, backbone, causal)
    layout = _layout(positions, endings, packed.starts.device)
    if merged_model.merge_depth:
        inputs = _states(contexts, endings, layout, packed, merged_model)
    else:
        units = merged_model.embed(packed)
        tail = backbone.embed(layout.tail_ids).to(units.dtype)
        front = _widened(units, tail.shape[1])
        inputs = torch.where((layout.groups == _CONTEXT)[..., None], front, tail)
    merged = _widened(packed.merged[..., None], inputs.shape[1])[..., 0]
    jumps = None if causal and unit_positions == "compact" else layout.positions
    mask = None if causal else block_mask(layout.groups, inputs.dtype)
    hidden = merged_model.trunk.hidden(inputs, merged, mask, jumps)
    scores = target_scores(hidden[layout.rows, layout.columns], layout.targets, backbone)
    flat = split_scores(scores, layout.sizes)
    scored = iter(flat)
    return [list(islice(scored, len(row))) for row in endings]


def _fitting(endings: Sequence[AnyInts], columns: int, room: int) -> list[list[AnyInts]]:
    """Cut continuations into runs that a row has room for behind so many columns, at least one."""
    parts, width = list[list[AnyInts]](), 0
    for ending in endings:
        fed = len(ending) - 1
        if not parts or width + fed > room:
            parts.append([])
            width = columns
        parts[-1].append(ending)
        width += fed
    return parts


def _widened(units: Tensor, width: int) -> Tensor:
    """Pad units [B, S, d] on the right to ``width``, at least S."""
    return nn.functional.pad(units, (0, 0, 0, width - units.shape[1]))


def _states(
    contexts: Sequence[AnyInts],
    endings: Sequence[Sequence[AnyInts]],
    layout: _Layout,
    packed: PackedUnits,
    merged_model: MergedModel,
) -> Tensor:
    """Return the states before the merge depth [B, L, d] of units and continuations.

    The layers below the depth read the same rows raw: the context's tokens, then continuations.
    """
    raw = _layout([np.arange(len(ids)) for ids in contexts], endings, layout.groups.device)
    ids = raw.tail_ids.clone()
    for b, context in enumerate(contexts):
        ids[b, : len(context)] = torch.as_tensor(np.asarray(context, dtype=np.int64))
    alone = all(len(row) == 1 for row in endings)
    mask = None if alone else block_mask(raw.groups, merged_model.backbone.dtype)
    states = merged_model.trunk.raw_states(ids, mask, raw.positions)
    columns = torch.arange(layout.groups.shape[1], device=ids.device)
    saved = packed.raw_counts - packed.unit_counts
    ends = (columns + saved[:, None]).clamp(max=ids.shape[1] - 1)  # of tails and padding
    lengths = torch.ones_like(ends)
    front, units = layout.groups == _CONTEXT, packed.attention_mask
    ends[front] = packed.ends[units]
    lengths[front] = packed.lengths[units]
    return merged_model.states_of(ids, states, ends, lengths)


def _check_length(
    contexts: Sequence[AnyInts],
    endings: Sequence[Sequence[AnyInts]],
    backbone: Backbone,
    windowed: bool,
) -> None:
    """Refuse what does not fit; ``windowed`` if the backbone's own windows are in force."""
    inputs = [max(map(len, row)) - 1 for row in endings]
    needed = max(int(c[-1]) + 1 + n for c, n in zip(contexts, inputs, strict=True))
    units = max(len(c) + n for c, n in zip(contexts, inputs, strict=True))
    what, found = "a context and one continuation", f"{needed} positions for {units} units"
    remedy = "Cut the context on the left."
    backbone.check_positions(what, needed, EvaluationError, remedy, found)
    if not windowed:
        backbone.check_window(units)
