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


def positions_taken(held: int, new_tokens: int) -> int:
    """Return the positions of a prompt and of its new tokens, of which the last is never fed."""
    return held + new_tokens - 1


def check_room(backbone: Backbone, positions: int, new_tokens: int) -> None:
    held = positions - positions_taken(0, new_tokens)
    backbone.check_positions(
        "prompt and new tokens",
        positions,
        ContextLengthError,
        "Shorten the prompt, or lower max_new_tokens.",
        f"{held} prompt positions + {new_tokens} new tokens",
    )
