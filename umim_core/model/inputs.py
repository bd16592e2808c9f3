"""Prompts as raw ids: texts, chats with or without their past, ids, a tokenizer's output."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from umim_core.backbone.backbone import Backbone
from umim_core.errors import GenerationError, require
from umim_core.inference.outputs import GenerationState
from umim_core.rules.matcher import PromptIds
from umim_core.text.chat_parts import encode_parts, log_unmerged, write_chat
from umim_core.text.roles import USER, Role
from umim_core.text.template_process import Chat, Tools
from umim_core.text.token_ids import decode, encode

TokenIds = Sequence[int] | NDArray[np.integer] | Tensor
PromptInput = (
    str | Chat | TokenIds | Sequence[str] | Sequence[Chat] | Sequence[TokenIds] | Mapping[str, Any]
)
Mask = Sequence[int] | Sequence[Sequence[int]] | NDArray[np.integer] | Tensor
Item = str | Chat | NDArray[np.integer]  # one prompt; ids are 1-D
_BEFORE: Final = 20  # characters before a difference that a message quotes
_BEHIND: Final = 40
_log: Final = logging.getLogger("umim")
_REMEDY: Final = (
    "Pass texts, chats (lists of messages), ids, or what a tokenizer returns, with its attention "
    "mask where rows are padded."
)


def prompt_items(
    prompts: PromptInput | None, input_ids: PromptInput | None = None, mask: Mask | None = None
) -> list[Item]:
    """Return prompts one by one, padding left out.

    ``prompts``, by transformers' name ``input_ids``, are one text, chat or sequence of ids, or
    several; a 1-D or 2-D array or tensor of ids; or a mapping with ``input_ids`` and perhaps
    ``attention_mask``, as tokenizers return it. A mask is 1 where ids count, 0 at padding, in the
    shape of the ids.
    """
    found = "not at all" if prompts is None else "prompts and input_ids"
    remedy = "Pass them as the first argument, or as input_ids."
    once = (prompts is None) != (input_ids is None)
    require(once, GenerationError, "prompts must be given once", found, remedy)
    entries: Any = input_ids if prompts is None else prompts
    if isinstance(entries, Mapping):
        if "input_ids" not in entries:
            raise _unfit(f"a mapping of {sorted(map(str, entries))}")
        once = mask is None or entries.get("attention_mask") is None
        rule, remedy = "an attention mask must be given once", "Leave one of them out."
        require(once, GenerationError, rule, "twice", remedy)
        mask = entries.get("attention_mask") if mask is None else mask
        entries = entries["input_ids"]
    if isinstance(entries, str) or _is_chat(entries) or _is_row(entries):
        entries = [entries]
    elif not is_list(entries) and not isinstance(entries, Tensor | np.ndarray):
        raise _unfit(type(entries).__name__)
    elif isinstance(entries, Tensor | np.ndarray) and entries.ndim != 2:
        raise _unfit(f"ids of shape {tuple(entries.shape)}")
    items = [_item(entry) for entry in entries]
    return items if mask is None else _masked(items, mask)


def is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(
        value, str | bytes | bytearray | memoryview
    )


def _is_chat(value: Any) -> bool:
    return is_list(value) and len(value) > 0 and isinstance(value[0], Mapping)


def _is_row(value: Any) -> bool:
    if isinstance(value, Tensor | np.ndarray):
        return value.ndim == 1
    return is_list(value) and len(value) > 0 and isinstance(value[0], int | np.integer)


def _item(entry: Any) -> Item:
    if isinstance(entry, str):
        return entry
    if _is_chat(entry):
        if any(isinstance(m, Mapping) and "input_ids" in m for m in entry):
            raise _unfit("a list of mappings with input_ids")
        return cast("Chat", list(entry))
    if not isinstance(entry, Tensor | np.ndarray) and not is_list(entry):
        raise _unfit(f"a prompt of type {type(entry).__name__}")
    try:
        ids = np.asarray(entry.detach().cpu() if isinstance(entry, Tensor) else entry)
    except (TypeError, ValueError) as error:  # lists of different lengths, tensors of no ids
        raise _unfit(str(error)) from error
    if ids.ndim == 2 and len(ids) == 1:
        ids = ids[0]
    if ids.ndim != 1:
        raise _unfit(f"ids of shape {ids.shape}")
    return ids if ids.size else ids.astype(np.int64)


def _masked(items: list[Item], mask: Mask) -> list[Item]:
    if not isinstance(mask, Tensor | np.ndarray) and not is_list(mask):
        raise _unfit(f"a mask of type {type(mask).__name__}")
    rows = [row for row in prompt_items(mask) if isinstance(row, np.ndarray)]
    fits = len(rows) == len(items) and all(
        isinstance(item, np.ndarray) and item.shape == row.shape
        for item, row in zip(items, rows, strict=True)
    )
    rule = "an attention mask must have the shape of the ids"
    found = f"{[row.shape for row in rows]} for {len(items)} prompts"
    require(fits, GenerationError, rule, found, _REMEDY)
    pairs = zip(cast("list[NDArray[np.integer]]", items), rows, strict=True)
    return [ids[row.astype(bool)] for ids, row in pairs]


def _unfit(what: str) -> GenerationError:
    return GenerationError("prompts must be texts, chats or token ids", what, _REMEDY)


def encode_prompts(
    items: Sequence[Item],
    backbone: Backbone,
    past: GenerationState | None,
    add_special_tokens: bool | None = None,
    tools: Tools | None = None,
    roles: Sequence[Role] = USER,
) -> list[PromptIds]:
    """Return the raw ids of prompts; of chats with the parts that may merge (``chat_parts``).

    What continues ``past``, a row of it each, is only what is added; but a chat is the whole
    conversation, of which the past is left out here. Texts get special tokens, a BOS say, as asked
    for; None does as the tokenizer does by default, and adds none to a text that continues
    ``past``. Chats never get any: their template writes them.
    """
    of_chats = tools is None or not any(isinstance(item, str | np.ndarray) for item in items)
    rule = "tools are of chats: the template writes them"
    remedy = "Pass messages, or leave the tools out."
    require(of_chats, GenerationError, rule, "a text or ids", remedy)
    if add_special_tokens is None and past is not None:
        add_special_tokens = False
    rows = list[PromptIds]()
    for b, item in enumerate(items):
        if isinstance(item, np.ndarray):
            rows.append(PromptIds(item))
        elif isinstance(item, str):
            ids = encode(backbone.require_tokenizer(), item, add_special_tokens)
            rows.append(PromptIds(np.array(ids, dtype=np.int64)))
        else:
            tokenizer = backbone.require_tokenizer()
            before = None if past is None else past.raw_ids[b]
            rows.append(_encode_chat(item, tokenizer, before, tools, roles))
    return rows


def warn_of_padding(items: Sequence[Item], backbone: Backbone) -> None:
    """Warn where rows of ids begin or end with padding, and no mask says so."""
    pad = None if backbone.tokenizer is None else backbone.tokenizer.pad_token_id
    if pad is None or len(items) < 2:
        return
    padded = [
        number
        for number, item in enumerate(items)
        if isinstance(item, np.ndarray) and len(item) and pad in (item[0], item[-1])
    ]
    if padded:
        _log.warning(
            "umim: rows %s begin or end with the padding token %d and are read with it; pass their "
            "attention_mask",
            *(padded, pad),
        )


def _encode_chat(
    chat: Chat,
    tokenizer: PreTrainedTokenizerBase,
    past: Sequence[int] | None,
    tools: Tools | None,
    roles: Sequence[Role],
) -> PromptIds:
    written = write_chat(chat, tokenizer, tools, roles)
    text, places, unmerged = written.text, written.places, written.unmerged
    added = text if past is None else _added(text, past, tokenizer)
    before = len(text) - len(added)
    if not text.endswith(added):
        unmerged = "the tokenizer does not write its state as the template does"
        log_unmerged(unmerged)
        places = []
    moved = [(max(0, start - before), end - before) for start, end in places if end > before]
    return PromptIds(*encode_parts(tokenizer, added, moved), unmerged)


def encode_prefix(
    text: PromptInput,
    backbone: Backbone,
    add_special_tokens: bool | None = None,
    tools: Tools | None = None,
    roles: Sequence[Role] = USER,
) -> PromptIds:
    """Return the raw ids of a text, or of a chat up to the end of its last message's content."""
    items = prompt_items(text)
    rule = "a prefix is one text or chat"
    require(len(items) == 1, GenerationError, rule, f"{len(items)} texts", "Pass one.")
    item = items[0]
    if isinstance(item, str | np.ndarray):
        return encode_prompts(items, backbone, None, add_special_tokens, tools)[0]
    tokenizer = backbone.require_tokenizer()
    written = write_chat(item, tokenizer, tools, roles)
    if written.end is None or item[-1].get("role") != "user":
        rule = "a prefix must end with what a user says, as it is written by the template"
        remedy = "Pass the chat up to the message that questions go on, or a text."
        raise GenerationError(rule, f"a last message of {item[-1].get('role')!r}", remedy)
    read = written.text[: written.end]
    places = [place for place in written.places if place[1] <= written.end]
    return PromptIds(*encode_parts(tokenizer, read, places), written.unmerged)


def _added(text: str, past: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """Return what a conversation, written by its template, adds to its past.

    Many templates trim the replies that they write, and some decoders put spaces behind special
    tokens; the past holds replies as they were generated. So white space may differ::

        past    user: Hi<end>assistant:  Sure.
        text    user: Hi<end>assistant: Sure.<end>user: And?<end>assistant:
        added                                <end>user: And?<end>assistant:
    """
    said = decode(tokenizer, past, special=True)
    if text.startswith(said):
        return text[len(said) :]
    written = decode(tokenizer, encode(tokenizer, text), special=True)  # as the past
    at = 0
    for number, letter in enumerate(said):
        if letter.isspace():
            continue
        while written[at : at + 1].isspace():
            at += 1
        if written[at : at + 1] != letter:
            raise GenerationError(
                "a continued chat must begin with what its state holds",
                f"{written[max(0, at - _BEFORE) : at + _BEHIND]!r} against "
                f"{said[max(0, number - _BEFORE) : number + _BEHIND]!r} from character {at} on",
                "Pass the whole conversation unchanged (its template must write replies as they "
                "were generated, but for white space), or the added text as a string.",
            )
        at += 1
    blank = said[len(said.rstrip()) :]  # is in the past, and perhaps in the text
    both = takewhile(lambda pair: pair[0] == pair[1], zip(blank, written[at:], strict=False))
    return written[at + len(list(both)) :]
