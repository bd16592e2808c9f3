"""Stopping of a row, on raw ids, with transformers' own criteria."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final, Literal, cast

import numpy as np
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    MaxTimeCriteria,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
)

from umim_core.backbone.backbone import Backbone
from umim_core.encodable import encoding_error
from umim_core.errors import GenerationError, require

_FIRST_CAPACITY: Final = 64


class History:
    """Keep the ids of B rows, so that a token costs one id to copy and not T."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = device
        self._known: dict[int, tuple[Tensor, int]] = {}

    def row(self, number: int, raw_ids: Sequence[int]) -> Tensor:
        """Return a row's ids [T] as [1, T]; those of earlier calls are not read again."""
        buffer, known = self._known.get(
            number, (torch.empty(0, dtype=torch.int64, device=self._device), 0)
        )
        length = len(raw_ids)
        if length > len(buffer):
            larger = torch.empty(
                max(_FIRST_CAPACITY, 2 * length), dtype=torch.int64, device=self._device
            )
            larger[:known] = buffer[:known]
            buffer = larger
        new = torch.tensor(raw_ids[known:], dtype=torch.int64, device=self._device)
        buffer[known:length] = new
        self._known[number] = (buffer, length)
        return buffer[None, :length]


StopReason = Literal["eos", "stop_string", "criteria", "length"]


def eos_ids(eos: int | Sequence[int] | None) -> list[int]:
    """Return the ids of an ``eos_token_id`` setting, which may be one, several or none."""
    if eos is None:
        return []
    try:
        return [int(eos)] if isinstance(eos, int | np.integer) else [int(i) for i in eos]
    except (TypeError, ValueError) as error:
        raise GenerationError(
            "eos_token_id must be one id or several", eos, "Give whole numbers, or None."
        ) from error


def end_ids(backbone: Backbone) -> list[int]:
    """Return the ids that end a text: the model's own, else the tokenizer's."""
    eos = backbone.model.generation_config.eos_token_id
    if eos is None and backbone.tokenizer is not None:
        eos = backbone.tokenizer.eos_token_id
    return eos_ids(eos)


class Stopper:
    """Decide whether a row ends with the token just chosen.

    Stop strings, which need a tokenizer, are looked for in generated text only, and there in as
    many tokens at the end as the longest of them has characters (bytes). Each of the further
    ``criteria`` is called once per row and token with that row's raw ids [1, T], prompt included,
    and without scores.
    """

    def __init__(
        self,
        config: GenerationConfig,
        tokenizer: PreTrainedTokenizerBase | None,
        criteria: StoppingCriteriaList | None = None,
    ) -> None:
        assert config.max_new_tokens is not None  # noqa: S101  check_generation_config
        self._max_new_tokens = config.max_new_tokens
        self._eos = frozenset(eos_ids(config.eos_token_id))
        self._strings = _stop_strings(config, tokenizer)
        self._criteria = StoppingCriteriaList(criteria or [])
        if config.max_time is not None:
            self._criteria.append(MaxTimeCriteria(config.max_time))
        self._history = History()

    def reason(self, raw_ids: Sequence[int], generated: int, row: int = 0) -> StopReason | None:
        """Return why the row ends here, or None."""
        if raw_ids[-1] in self._eos:
            return "eos"
        if self._strings is not None:
            tail = raw_ids[-min(generated, self._strings.maximum_token_len) :]
            if bool(self._strings(cast("torch.LongTensor", torch.tensor([tail])), None)[0]):
                return "stop_string"
        if self._criteria:
            ids = cast("torch.LongTensor", self._history.row(row, raw_ids))
            if bool(self._criteria(ids, None)[0]):
                return "criteria"
        return "length" if generated >= self._max_new_tokens else None


def stop_texts(option: object) -> list[str]:
    """Return one stop string or several as a list."""
    several = isinstance(option, Iterable) and not isinstance(option, str)
    texts: list[object] = list(cast("Iterable[object]", option)) if several else [option]
    if not all(isinstance(text, str) and text for text in texts):
        raise GenerationError(
            "stop_strings must be texts of at least one character", texts, "Leave others out."
        )
    for text in cast("list[str]", texts):
        require(
            encoding_error(text) is None,
            GenerationError,
            "stop_strings must hold no lone surrogates",
            texts,
            "Leave such a text out.",
        )
    return cast("list[str]", texts)


def _stop_strings(
    config: GenerationConfig, tokenizer: PreTrainedTokenizerBase | None
) -> StopStringCriteria | None:
    if not config.stop_strings:
        return None
    if tokenizer is None:
        raise GenerationError(
            "stop strings need a tokenizer", config.stop_strings, "Use eos_token_id."
        )
    strings = stop_texts(config.stop_strings)
    try:
        return _analysed(tokenizer, len(tokenizer), tuple(strings))
    except ValueError as error:  # its analysis encodes "abcdef" and looks for it
        raise GenerationError(
            "stop strings need a tokenizer that can encode Latin letters",
            str(error),
            "Use eos_token_id.",
        ) from error


@lru_cache(maxsize=16)
def _analysed(
    tokenizer: PreTrainedTokenizerBase, _size: int, strings: tuple[str, ...]
) -> StopStringCriteria:
    """Analyse a vocabulary once: it takes a second at 100,000 ids. Added tokens change its size."""
    return StopStringCriteria(tokenizer, list(strings))
