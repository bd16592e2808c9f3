"""What a request starts from: prompts checked, cut into units and packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from umim_core.backbone import Backbone
from umim_core.errors import GenerationError
from umim_core.merging.compress import PackedUnits, Segmentation, pack_rows, segmentation
from umim_core.rules.matcher import Matcher

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Prompts:
    """The rows of a request, before samples are split off.

    Attributes:
        ids: Raw ids to prefill per row [T_b].
        cuts: Their units (starts, lengths) per row.
        packed: The same as tensors.
    """

    ids: list[Ids]
    cuts: list[Segmentation]
    packed: PackedUnits


def read_prompts(
    prompts: Sequence[NDArray[np.integer] | Sequence[int]],
    unfed: Sequence[int] | None,
    backbone: Backbone,
    matcher: Matcher | None,
    *,
    across_turns: bool = False,
) -> Prompts:
    """Check prompts and cut them into units.

    Args:
        prompts: Raw ids per row [T_b].
        unfed: What an earlier turn chose last and never fed, one id per row; it comes first.
        backbone: Whose ids they are.
        matcher: The rules; None keeps every token.
        across_turns: Whether a rule may begin with the unfed token.

    Raises:
        GenerationError: If there is no prompt, a prompt is empty (but for an unfed token), or it
            holds an id outside the vocabulary.
    """
    if len(prompts) == 0:
        raise GenerationError("there must be at least one prompt", 0, "Pass one.")
    new = [_checked(b, ids, backbone.vocab_size, unfed) for b, ids in enumerate(prompts)]
    if unfed is None:
        rows, cuts = new, [segmentation(ids, matcher) for ids in new]
    else:
        rows = [np.concatenate([[last], ids]) for last, ids in zip(unfed, new, strict=True)]
        cuts = [
            segmentation(ids, matcher) if across_turns else _behind_one(segmentation(rest, matcher))
            for ids, rest in zip(rows, new, strict=True)
        ]
    return Prompts(rows, cuts, pack_rows(rows, cuts, device=backbone.device))


def _behind_one(cut: Segmentation) -> Segmentation:
    """Put a unit of one token before the units of a text."""
    starts, lengths = cut
    return np.append(np.int64(0), starts + 1), np.append(np.int64(1), lengths)


def _checked(
    b: int,
    ids: NDArray[np.integer] | Sequence[int],
    vocab_size: int,
    unfed: Sequence[int] | None,
) -> Ids:
    try:
        array = np.asarray(ids)
    except ValueError as error:  # lists of different lengths inside
        raise GenerationError(
            "a prompt must be a 1-D array of token ids", f"prompt {b}", str(error)
        ) from error
    if array.ndim == 1 and array.size == 0 and unfed is not None:
        return array.astype(np.int64)
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
        raise GenerationError(
            "a prompt must be a 1-D array of at least one token id",
            f"prompt {b}: shape {array.shape}, {array.dtype}",
            "Put a BOS token into an empty prompt.",
        )
    wide = array.astype(np.int64)
    if int(wide.min()) < 0 or int(wide.max()) >= vocab_size:
        raise GenerationError(
            f"ids must lie between 0 and {vocab_size - 1}",
            f"prompt {b}: {int(wide.min())} .. {int(wide.max())}",
            "Encode with the backbone's own tokenizer.",
        )
    return wide


def check_room(backbone: Backbone, units: int, positions: int, new_tokens: int) -> None:
    """Refuse a request that the backbone has no room for.

    Args:
        backbone: The frozen model.
        units: Units that the longest row may hold.
        positions: Positions that a row may take; as many unless they are preserved.
        new_tokens: Tokens to generate, for the message.

    Raises:
        GenerationError: If they exceed its positions.
    """
    most = backbone.max_positions
    if most is not None and positions > most:
        raise GenerationError(
            f"prompt units and new tokens must fit the backbone's {most} positions",
            f"{positions - new_tokens + 1} prompt positions + {new_tokens} new tokens",
            "Shorten the prompt or lower max_new_tokens.",
        )
