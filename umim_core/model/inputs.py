"""Prompts in every form that callers have them: texts, chats, ids, a tokenizer's output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from umim_core.errors import GenerationError

Chat = Sequence[Mapping[str, Any]]
TokenIds = Sequence[int] | NDArray[np.integer] | Tensor
PromptInput = (
    str | Chat | TokenIds | Sequence[str] | Sequence[Chat] | Sequence[TokenIds] | Mapping[str, Any]
)
Mask = Sequence[int] | Sequence[Sequence[int]] | NDArray[np.integer] | Tensor
Item = str | Chat | NDArray[np.integer]  # one prompt; ids are 1-D
_REMEDY: Final = (
    "Pass texts, chats (lists of messages), ids, or what a tokenizer returns, with its attention "
    "mask where rows are padded."
)


def prompt_items(
    prompts: PromptInput | None, input_ids: PromptInput | None = None, mask: Mask | None = None
) -> list[Item]:
    """Return prompts one by one, padding left out.

    Args:
        prompts: One text, chat or sequence of ids, or several; a 1-D or 2-D array or tensor of ids;
            a mapping with ``input_ids`` and perhaps ``attention_mask``, as tokenizers return it.
        input_ids: transformers' name of ``prompts``.
        mask: 1 where ids count, 0 at padding; in the shape of the ids.

    Raises:
        GenerationError: If there are no prompts or they are given twice, a mapping is none of a
            tokenizer's, or ids and mask have no such shape.
    """
    if (prompts is None) == (input_ids is None):
        raise GenerationError(
            "prompts must be given once",
            "not at all" if prompts is None else "prompts and input_ids",
            "Pass them as the first argument, or as input_ids.",
        )
    given: Any = input_ids if prompts is None else prompts
    if isinstance(given, Mapping):
        if "input_ids" not in given:
            raise _unfit(f"a mapping of {sorted(map(str, given))}")
        if mask is not None and given.get("attention_mask") is not None:
            raise GenerationError(
                "an attention mask must be given once", "twice", "Leave one of them out."
            )
        mask = given.get("attention_mask") if mask is None else mask
        given = given["input_ids"]
    if isinstance(given, str):
        items: list[Item] = [given]
    elif isinstance(given, Tensor | np.ndarray) or _is_number(_first(given)):
        items = list(_rows(given))
    elif isinstance(_first(given), Mapping):
        if any("input_ids" in message for message in given):
            raise _unfit("a list of mappings with input_ids")
        items = [cast("Chat", list(given))]
    else:
        items = [_item(entry) for entry in given]
    return items if mask is None else _masked(items, mask)


def _first(given: Any) -> object:
    """Return the first entry of a sequence; None of an empty one."""
    if not isinstance(given, Sequence):
        raise _unfit(type(given).__name__)
    return given[0] if given else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | np.integer)


def _item(entry: Any) -> Item:
    if isinstance(entry, str):
        return entry
    if isinstance(entry, Sequence) and entry and isinstance(entry[0], Mapping):
        return cast("Chat", entry)
    if not isinstance(entry, Sequence | Tensor | np.ndarray):
        raise _unfit(f"a prompt of type {type(entry).__name__}")
    rows = _rows(entry)
    if len(rows) != 1:
        raise _unfit("a list of 2-D ids")
    return rows[0]


def _rows(ids: Any) -> list[NDArray[np.integer]]:
    """Return the rows of 1-D or 2-D ids."""
    array = ids.detach().cpu().numpy() if isinstance(ids, Tensor) else _array(ids)
    if array.ndim not in (1, 2):
        raise _unfit(f"ids of shape {array.shape}")
    return [array] if array.ndim == 1 else list(array)


def _array(values: Any) -> NDArray[Any]:
    try:
        array = np.asarray(values)
    except ValueError as error:  # lists of different lengths inside
        raise _unfit(str(error)) from error
    return array if array.size else array.astype(np.int64)


def _masked(items: list[Item], mask: Mask) -> list[Item]:
    if not isinstance(mask, Tensor | np.ndarray | Sequence):
        raise _unfit(f"a mask of type {type(mask).__name__}")
    nested = isinstance(mask, Sequence) and len(mask) > 0 and not _is_number(mask[0])
    rows = [_array(row) for row in cast("Sequence[Any]", mask)] if nested else _rows(mask)
    fits = len(rows) == len(items) and all(
        isinstance(item, np.ndarray) and item.shape == row.shape
        for item, row in zip(items, rows, strict=True)
    )
    if not fits:
        raise GenerationError(
            "an attention mask must have the shape of the ids",
            f"{[row.shape for row in rows]} for {len(items)} prompts",
            _REMEDY,
        )
    pairs = zip(cast("list[NDArray[np.integer]]", items), rows, strict=True)
    return [ids[row.astype(bool)] for ids, row in pairs]


def _unfit(what: str) -> GenerationError:
    return GenerationError("prompts must be texts, chats or token ids", what, _REMEDY)
