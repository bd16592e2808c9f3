"""Prompts of a request, checked, cut into units and packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from umim_core.backbone.backbone import Backbone
from umim_core.errors import ContextLengthError, GenerationError, require
from umim_core.merging.merged_model import MergedModel
from umim_core.merging.packing import PackedUnits, Segmentation, pack_rows
from umim_core.rules.matcher import PromptIds
from umim_core.text.token_ids import Ints, id_array

TokenPrompt = NDArray[np.integer] | Sequence[int] | PromptIds


@dataclass(frozen=True)
class Prompts:
    """The rows of a request, before samples are split off: raw ids [T_b] and their units."""

    ids: list[Ints]
    cuts: list[Segmentation]
    device: torch.device

    @cached_property
    def packed(self) -> PackedUnits:
        return pack_rows(self.ids, self.cuts, self.device)

    def behind(self, tokens: int, units: int) -> Prompts:
        starts, lengths = self.cuts[0]
        cut = starts[units:] - tokens, lengths[units:]
        return Prompts([self.ids[0][tokens:]], [cut], self.device)


def read_prompts(
    prompts: Sequence[TokenPrompt],
    unfed: Sequence[int] | None,
    merged_model: MergedModel,
) -> Prompts:
    """Check prompts and cut them into units.

    What an earlier turn chose last and never fed comes first, one id per row; no rule begins with
    it.
    """
    if len(prompts) == 0:
        raise GenerationError("there must be at least one prompt", 0, "Pass one.")
    vocabulary = merged_model.backbone.vocab_size
    plain = [prompt.ids if isinstance(prompt, PromptIds) else prompt for prompt in prompts]
    new = [id_array(ids, vocabulary, f"prompt {b}: ") for b, ids in enumerate(plain)]
    bare = [b for b, ids in enumerate(new) if not len(ids) and unfed is None]
    rule = "a prompt must hold at least one token id"
    found = f"prompt {', '.join(map(str, bare))}, which is empty"
    require(not bare, GenerationError, rule, found, "Write something, or put a BOS token into it.")
    parts = [prompt.parts if isinstance(prompt, PromptIds) else None for prompt in prompts]
    cuts = [merged_model.segment_prompt(*pair) for pair in zip(new, parts, strict=True)]
    if unfed is not None:
        new = [np.concatenate([[last], ids]) for last, ids in zip(unfed, new, strict=True)]
        cuts = [(np.append(0, starts + 1), np.append(1, lengths)) for starts, lengths in cuts]
    return Prompts(new, cuts, merged_model.backbone.device)


def cut_left(prompts: Prompts, new_tokens: int, merged_model: MergedModel) -> Prompts:
    """Drop the leading units that a backbone has no positions for; a BOS in front stays.

    Matching from a unit border on gives the same units as matching the whole. Prompts that have no
    room for a single unit stay as they are.
    """
    backbone = merged_model.backbone
    if backbone.max_positions is None:
        return prompts
    room = backbone.max_positions - positions_taken(0, new_tokens)
    bos = None if backbone.tokenizer is None else backbone.tokenizer.bos_token_id
    rows, cuts = [], []
    for ids, (starts, lengths) in zip(prompts.ids, prompts.cuts, strict=True):
        needed = merged_model.positions_from(starts, len(ids), len(starts))
        front = int(lengths[0] == 1 and int(ids[0]) == bos)
        dropped = int((needed[front:] + front > room).sum()) if needed[0] > room else 0
        first = front + dropped
        if dropped and first < len(starts):
            start = starts[first]
            rows.append(np.concatenate([ids[:front], ids[start:]]))
            moved = np.concatenate([starts[:front], starts[first:] - start + front])
            cuts.append((moved, np.concatenate([lengths[:front], lengths[first:]])))
        else:
            rows.append(ids)
            cuts.append((starts, lengths))
    return Prompts(rows, cuts, backbone.device)


def positions_taken(held: int, new_tokens: int) -> int:
    """Return the positions of a prompt and of its new tokens, of which the last is never fed."""
    return held + new_tokens - 1


def check_room(backbone: Backbone, positions: int, new_tokens: int) -> None:
    held = positions - positions_taken(0, new_tokens)
    backbone.check_positions(
        "prompt and new tokens",
        positions,
        ContextLengthError,
        "Shorten the prompt, lower max_new_tokens, or use overlong='truncate'.",
        f"{held} prompt positions + {new_tokens} new tokens",
    )
